"""Runs that end with the process that started them: it holds a lease on each node, and restarts all together."""
