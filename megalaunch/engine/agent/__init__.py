"""The elastic agent of one node: torch's agent, with a rendezvous that authenticates peers and unpickles nothing.

The store listens on the loopback interface of node 0 only. The agents of several nodes authenticate each other with the
run's shared secret, and forward the store's connections between nodes.
"""
