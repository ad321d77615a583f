"""The run directory of a run of one CPU that trackers are fed from."""

from __future__ import annotations

from pathlib import Path

from tiny_run import tiny_spec

from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec, with_values
from megalaunch.schema.spec_file import write_spec


def one_worker() -> RunSpec:
    """A resolved spec of a run on one CPU."""
    return with_values(tiny_spec(), {"cluster.nodes": 1, "cluster.devices_per_node": 1, "platform.chip": "cpu"})


def directory_of(root: Path, **values: object) -> RunDirectory:
    directory = RunDirectory(root)
    directory.logs.mkdir(parents=True)
    write_spec(
        with_values(one_worker(), {key.replace("__", "."): value for key, value in values.items()}), directory.spec
    )
    return directory
