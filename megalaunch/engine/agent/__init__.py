"""The elastic agent of one machine: torch's agent, with a rendezvous that authenticates peers and unpickles nothing.

On one machine the store listens on the loopback interface. On several machines the first machine's store does too: the
agents authenticate each other with the run's shared secret, and forward the store's connections between machines.
"""
