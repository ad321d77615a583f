"""The run spec: every setting of a run, typed and frozen.

One file a section; `RunSpec` joins them. No torch, no Hydra: launcher and engine both import this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megalaunch.schema.batch import BatchSpec
from megalaunch.schema.build import SpecError, SpecProblem, build_section, check_leaves
from megalaunch.schema.checkpoint import CheckpointSpec
from megalaunch.schema.cluster import ClusterSpec
from megalaunch.schema.data import DataSpec
from megalaunch.schema.launcher import LauncherSpec
from megalaunch.schema.logging import LoggingSpec
from megalaunch.schema.model import ModelSpec
from megalaunch.schema.optimizer import OptimizerSpec
from megalaunch.schema.parallel import ParallelSpec
from megalaunch.schema.paths import put, with_value
from megalaunch.schema.platform import PlatformSpec
from megalaunch.schema.precision import PrecisionSpec
from megalaunch.schema.recompute import RecomputeSpec
from megalaunch.schema.run import RunSection
from megalaunch.schema.schedule import ScheduleSpec
from megalaunch.schema.tokenizer import TokenizerSpec
from megalaunch.schema.train import TrainSpec

__all__ = ["RunSpec", "SpecError", "SpecProblem", "build_run_spec", "spec_to_dict", "with_values"]


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The complete configuration of a run: written by the launcher, read by every rank and every resume."""

    model: ModelSpec
    parallel: ParallelSpec
    precision: PrecisionSpec
    recompute: RecomputeSpec
    platform: PlatformSpec
    cluster: ClusterSpec
    data: DataSpec
    tokenizer: TokenizerSpec
    optimizer: OptimizerSpec
    schedule: ScheduleSpec
    batch: BatchSpec
    train: TrainSpec
    checkpoint: CheckpointSpec
    launcher: LauncherSpec
    logging: LoggingSpec
    run: RunSection


def build_run_spec(data: Mapping[str, Any]) -> RunSpec:
    """Build a typed spec from nested plain mappings; raises SpecError with every problem at once."""
    return build_section(RunSpec, data)


def spec_to_dict(spec: RunSpec) -> dict[str, Any]:
    """Convert to plain nested dictionaries, in schema order; the inverse of `build_run_spec`."""
    return asdict(spec)


def with_values(spec: RunSpec, values: Mapping[str, Any]) -> RunSpec:
    """Return the spec with some leaves replaced, by dotted path (`{"parallel.dp": 2}`), and validate them."""
    typed = check_leaves(RunSpec, values)
    if typed is not None:
        return with_value(spec, typed)
    data = spec_to_dict(spec)
    for path, value in values.items():
        put(data, path, value)
    return build_run_spec(data)
