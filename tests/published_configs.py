"""config.json of published models, from the table beside the tests of families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).parent / "parity" / "families" / "published_configs.yaml"


def published_configs() -> dict[str, dict[str, Any]]:
    """By name, lists of factors written out."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return {name: _written_out(config) for name, config in yaml.load(TABLE.read_text(), Loader=loader).items()}


def _written_out(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"from", "to", "count"}:
        step = (value["to"] - value["from"]) / (value["count"] - 1)
        return [value["from"] + step * index for index in range(value["count"])]
    return {key: _written_out(inner) for key, inner in value.items()} if isinstance(value, dict) else value
