"""The run directory: the file interface between launcher and engine.

The launcher writes `spec.yaml`; workers write metrics, events, progress and the outcome, which the launcher reads and
displays. Launcher and engine import this package, and it imports neither.
"""
