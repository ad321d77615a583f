"""Detect a hang, and find the rank that the others wait for.

`rank_monitor.py` reads each rank's progress, `hang_detector.py` detects that no rank has made progress for too long,
`collective_traces.py` collects flight recorder traces, `collective_mismatch.py` finds the desynchronized rank in them,
and `diagnosis.py` combines these steps.
"""
