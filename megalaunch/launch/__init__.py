"""Start, monitor and stop workers; the run directory, and the displays and reports made from it.

A hang is diagnosed in three steps: `rank_monitor.py` reads each rank's progress, `hang_clock.py` detects that no rank
has made progress for too long, and `collective_mismatch.py` finds the rank that the others wait for, from the flight
recorder traces that `collective_traces.py` requests. `attempt.py` combines them, `failure.py` finds the first failure
after a crash.
"""
