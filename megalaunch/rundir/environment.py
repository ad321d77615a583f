"""Environment variables by which the launcher speaks to its workers."""

from __future__ import annotations

LAUNCHER_PID_VARIABLE = "MEGALAUNCH_LAUNCHER_PID"
"""The process whose end ends the workers too."""
