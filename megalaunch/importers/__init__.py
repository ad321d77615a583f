"""Runs and models of other programs, read into sections of a run spec (no torch)."""
