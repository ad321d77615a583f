"""The run directory: the second half of the door between launcher and engine.

The launcher writes `spec.yaml`; workers write metrics, events, progress and the outcome; the launcher
draws from them. Both wings import this package, and it imports neither.
"""
