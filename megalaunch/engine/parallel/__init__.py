"""Parallelism of a model over a device mesh: one kind of parallelism a file."""
