"""Orchestration below the commands: prepare a run, run a sweep, run a multi-worker job."""
