"""The part of megalaunch that needs torch: what workers execute, and the library API.

This file imports nothing: a worker installs its signal handlers and its parent-death signal before it imports torch.
"""
