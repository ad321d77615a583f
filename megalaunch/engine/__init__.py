"""Everything that needs torch, and what one worker executes.

This file imports nothing: a worker must protect itself (signals, parent death) before torch loads.
"""
