"""Starting, watching and stopping workers; the run directory and what is drawn from it."""
