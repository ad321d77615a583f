"""Resolve the interpolations of a composed config, and report each that fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megalaunch.config.interpolation import interpolation_problem
from megalaunch.schema.paths import put


def register_resolvers() -> None:
    """Register `${mg.mul:a,b}` and the like: exact arithmetic on values of other keys."""
    for name, resolver in (("add", _add), ("sub", _subtract), ("mul", _multiply), ("div", _divide)):
        OmegaConf.register_new_resolver(f"mg.{name}", resolver, replace=True)


def to_plain_data(config: DictConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the config as nested plain data, interpolations resolved, and a message for each key that fails.

    A value that fails is None. Nothing is resolved if any interpolation is refused: another key may refer to it.
    """
    data: dict[str, Any] = OmegaConf.to_container(config, resolve=False)  # type: ignore[assignment]
    found = dict(_interpolations(data, ""))
    problems = {path: text for path, texts in found.items() for text in map(interpolation_problem, texts) if text}
    refused = bool(problems)
    for path in found:
        value = None
        if not refused:
            try:
                value = _plain(OmegaConf.select(config, path))
            except OmegaConfBaseException as error:
                problems[path] = f"cannot be interpolated: {str(error).splitlines()[0]}"
        put(data, path, value)
    return data, problems


def _interpolations(value: Any, path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each leaf (lists are leaves) that has an interpolation, with its texts."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _interpolations(below, f"{path}.{key}" if path else str(key))
        return
    texts = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str) and "${" in item]
    if texts:
        yield path, texts


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value


def _add(left: float, right: float) -> float:
    return left + right


def _subtract(left: float, right: float) -> float:
    return left - right


def _multiply(left: float, right: float) -> float:
    return left * right


def _divide(left: float, right: float) -> float:
    """Return the quotient: an integer if it is exact."""
    return left // right if left % right == 0 else left / right
