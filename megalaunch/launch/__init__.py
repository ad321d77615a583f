"""Start, monitor and stop workers; the run directory, and the displays and reports made from it."""
