"""Start work on other machines: submit a job, ask for its state, stop it, find its logs.

`megalaunch.launch` runs the agent of one node; a launcher decides on which nodes that happens. A training run is one
job, and so may be any other command that runs once on each of its nodes.
"""
