"""Where everything in a run directory is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_STEP = re.compile(r"step_(\d{8})")


@dataclass(frozen=True)
class RunDirectory:
    """Paths below one run's directory."""

    root: Path

    @property
    def spec(self) -> Path:
        """The frozen run spec."""
        return self.root / "spec.yaml"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer.json of the run, kept when it starts."""
        return self.root / "tokenizer.json"

    @property
    def origin(self) -> Path:
        """What the weights that the run began with came with: tokenizer files and the like."""
        return self.root / "origin"

    @property
    def rendezvous(self) -> Path:
        """What the agents of several machines know each other by; for the user alone."""
        return self.root / "rendezvous.json"

    @property
    def overrides(self) -> Path:
        """The command-line words of every launch, one launch a line."""
        return self.root / "overrides.txt"

    @property
    def metrics(self) -> Path:
        """One line a step, one line a validation."""
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """What happened: launches, phases, checkpoints, failures, stops."""
        return self.root / "events.jsonl"

    @property
    def outcome(self) -> Path:
        """How the newest launch ended."""
        return self.root / "outcome.json"

    @property
    def lock(self) -> Path:
        """Held by the launcher that owns the directory."""
        return self.root / "lock"

    @property
    def logs(self) -> Path:
        """One file a rank, and the agent's."""
        return self.root / "logs"

    @property
    def checkpoints(self) -> Path:
        """Finished checkpoints, `step_<8 digits>` each."""
        return self.root / "checkpoints"

    @property
    def plots(self) -> Path:
        """Pictures drawn when a launch ends."""
        return self.root / "plots"

    @property
    def sample(self) -> Path:
        """The text the model wrote when the run was done."""
        return self.root / "sample.txt"

    @property
    def agent_log(self) -> Path:
        """Where the elastic agents' own output goes."""
        return self.logs / "agent.log"

    def rank_log(self, rank: int) -> Path:
        """Everything rank `rank` printed."""
        return self.logs / f"rank_{rank}.log"

    def progress(self, rank: int) -> Path:
        """Where rank `rank` is now."""
        return self.logs / f"rank_{rank}.progress.json"

    def collective_trace(self, rank: int) -> Path:
        """The last collectives of rank `rank`, when it was asked or crashed."""
        return self.logs / f"rank_{rank}.collectives.json"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint taken after step `step`."""
        return self.checkpoints / f"step_{step:08d}"


def checkpoint_step(path: Path) -> int | None:
    """The step in a checkpoint directory's name, or None for any other name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None
