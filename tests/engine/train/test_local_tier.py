"""A tier of local checkpoints retains what is being copied to another tier, on whichever thread that ends."""

from __future__ import annotations

from pathlib import Path

from megalaunch.engine.train.background_save import BackgroundSave
from megalaunch.engine.train.local_tier import LocalTier, PendingDrain, TierSettings
from megalaunch.engine.train.run_logger import RunLogger
from megalaunch.rundir.checkpoint.local_shards import shard_directory
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import ProgressWriter


class DrainThatEnds(LocalTier):
    """A tier whose drain ends, on the thread that copies it, after every look at it."""

    @property
    def drain(self) -> PendingDrain | None:
        drain, self._drain = self._drain, None
        return drain

    @drain.setter
    def drain(self, drain: PendingDrain | None) -> None:
        self._drain = drain


def test_a_drain_may_end_while_a_later_checkpoint_is_published(tmp_path: Path):
    directory = RunDirectory(tmp_path / "run")
    directory.logs.mkdir(parents=True)
    record = RunLogger(directory, 0, ProgressWriter(directory.progress(0), 0, 0))
    settings = TierSettings("memory", interval=1, path=str(tmp_path / "memory"), replicate=False, keep=1)
    tier = DrainThatEnds(settings, 1, directory, record, BackgroundSave(record, is_used=False))
    copied, newest = (shard_directory(tier.folder.path, 0, step) for step in (1, 2))
    for shard in (copied, newest):
        shard.mkdir(parents=True)

    tier.drain = PendingDrain(1)
    assert tier._superseded(0) == []
    assert tier._superseded(0) == [copied]

    tier.drain = drain = PendingDrain(2)
    tier.publish(2, has_copies=True, seconds=0.0, waited=0.0)
    assert (drain.is_complete, drain.has_copies) == (True, True)
