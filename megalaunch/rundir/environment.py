"""Environment variables that the launcher sets for its workers."""

from __future__ import annotations

from collections.abc import Mapping

LAUNCHER_PID_VARIABLE = "MEGALAUNCH_LAUNCHER_PID"
"""Process id of the launcher; workers end when it ends."""
ROUND_VARIABLE = "MEGALAUNCH_RENDEZVOUS_ROUND"
"""Number of rendezvous of the agents so far; separates the rounds' keys in the shared store."""
ATTEMPT_VARIABLE = "MEGALAUNCH_ATTEMPT"
"""Number of agents that the launcher has started before this one; set where it restarts them itself."""


def current_attempt(environment: Mapping[str, str]) -> int:
    """Return the number of earlier starts of the workers: by the launcher, or by restarts of the agent."""
    return int(environment.get(ATTEMPT_VARIABLE, "0")) + int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
