"""Start, monitor and stop workers; read their state.

`local.py` starts the agent, `supervise.py` runs its attempts with restarts, `attempt.py` polls one of them. `hang/`
detects and diagnoses hangs, `failure.py` finds the first failure after a crash, `display/` prints the run.
"""
