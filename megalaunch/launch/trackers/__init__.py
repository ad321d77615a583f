"""Trackers: each is fed from the files of the run by a process of its own, which training never waits for."""
