"""Environment variables by which the launcher speaks to its workers."""

from __future__ import annotations

from collections.abc import Mapping

LAUNCHER_PID_VARIABLE = "MEGALAUNCH_LAUNCHER_PID"
"""The process whose end ends the workers too."""
ROUND_VARIABLE = "MEGALAUNCH_RENDEZVOUS_ROUND"
"""How often all agents of the run have started workers together; it keeps the rounds apart in a store they share."""
ATTEMPT_VARIABLE = "MEGALAUNCH_ATTEMPT"
"""How often the launcher has started an agent before this one."""


def current_attempt(environment: Mapping[str, str]) -> int:
    """How often the workers of this launch were started before: by the launcher, or by an agent started by hand."""
    return int(environment.get(ATTEMPT_VARIABLE, "0")) + int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
