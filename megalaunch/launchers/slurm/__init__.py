"""Slurm: a batch script with one agent on each node, and the commands that submit, show and stop it."""
