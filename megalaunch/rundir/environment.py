"""Environment variables that the launcher sets for its workers."""

from __future__ import annotations

from collections.abc import Mapping

LAUNCHER_PID_VARIABLE = "MEGALAUNCH_LAUNCHER_PID"
"""Process id of the launcher; workers end when it ends."""
ROUND_VARIABLE = "MEGALAUNCH_RENDEZVOUS_ROUND"
"""Number of rendezvous of the agents so far; separates the rounds' keys in the shared store."""
HANGS_WATCHED_VARIABLE = "MEGALAUNCH_HANGS_WATCHED"
"""Set where a launcher watches the workers for hangs: it ends a hang before the timeout of the collectives does."""
ATTEMPT_VARIABLE = "MEGALAUNCH_ATTEMPT"
"""Number of agents that the launcher has started before this one; set where it restarts them itself."""
FINAL_CODE_VARIABLE = "MEGALAUNCH_FINAL_CODE"
"""File for the exit code of a launcher that no restart cures; set where a script starts the launchers again."""


def agent_restarts(environment: Mapping[str, str]) -> int:
    """Return how often the agents have restarted the workers: the same number on all nodes.

    torch's own count is that of the failures of one node: it does not grow where the workers of another node failed.
    """
    if ROUND_VARIABLE in environment:
        return int(environment[ROUND_VARIABLE]) - 1
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))


def current_attempt(environment: Mapping[str, str]) -> int:
    """Return the number of earlier starts of the workers: by the launcher, or by restarts of the agents."""
    return int(environment.get(ATTEMPT_VARIABLE, "0")) + agent_restarts(environment)
