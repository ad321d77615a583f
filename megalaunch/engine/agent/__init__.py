"""The elastic agent of one machine: torch's own, with a rendezvous that lets nobody in and unpickles nothing.

A run on one machine keeps its store on the loopback interface. On several machines the first one's store stays there
too: the agents prove to each other that they know the run's secret, and carry the store's connections between them.
"""
