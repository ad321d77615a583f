"""`spec.yaml`: the complete, resolved and versioned run spec on disk."""

from __future__ import annotations

from pathlib import Path

import yaml

from megalaunch.fs import write_file_atomically
from megalaunch.schema import RunSpec, SpecError, SpecProblem, build_run_spec, spec_to_dict
from megalaunch.schema.yaml_file import YamlProblem, load_yaml

SPEC_VERSION = 1
_MAX_BYTES = 256 * 1024  # a recipe's keys with all defaults


def spec_to_text(spec: RunSpec) -> str:
    """Return the YAML text of a spec file."""
    return yaml.safe_dump({"version": SPEC_VERSION, **spec_to_dict(spec)}, sort_keys=False, allow_unicode=True)


def write_spec(spec: RunSpec, path: Path) -> None:
    """Write a spec file atomically and sync it: no reader sees a part of it, no power failure leaves it empty."""
    write_file_atomically(path, spec_to_text(spec))


def read_spec(path: Path) -> RunSpec:
    """Read a spec file; raises SpecError when it is invalid or of an unknown version, FileNotFoundError."""
    if not path.exists():
        raise FileNotFoundError(path)
    try:
        data = load_yaml(path, max_bytes=_MAX_BYTES).data
    except YamlProblem as problem:
        raise SpecError([SpecProblem(problem.where, problem.message)]) from problem
    version = data.pop("version", None)
    if version != SPEC_VERSION:
        raise SpecError([SpecProblem(f"{path}: version", f"is {version!r}; this megalaunch reads {SPEC_VERSION}")])
    return build_run_spec(data)
