"""Run specs for library users: composed and resolved as `megalaunch train` does it, without its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megalaunch.plan.resolve import resolve as resolve_on
from megalaunch.platform.detect import detect_machine
from megalaunch.runs.hub_names import fetch_hub_files, pin_hub_names
from megalaunch.runs.prepared_data import apply_prepared
from megalaunch.schema import RunSpec


def compose(overrides: Sequence[str] = ()) -> RunSpec:
    """Compose overrides, such as `recipe=tiny parallel=tp2`, to a run spec, and derive its open values.

    Args:
        overrides: As on the command line of `megalaunch train`.

    Returns:
        The spec; values that cannot be derived stay None. `check` says which are missing, `prepare_data` sets
        `model.vocab_size`.

    Raises:
        ConfigError: It lists every problem of the overrides and of the files that they name.
        HubError: A name on the Hugging Face Hub cannot be used.
        TypeError: `overrides` is one string.
    """
    if isinstance(overrides, str):
        raise TypeError(f"overrides are a list of strings, not one: compose({overrides.split()})")
    from megalaunch.config.compose import compose as composed  # Hydra is only for specs that are composed

    composition = composed(overrides)
    spec = resolve_on(composition.spec, detect_machine(), composition.choices.get("recipe")).spec
    return pin_hub_names(spec, composition.choices.get("model", ""))


def resolve(spec: RunSpec) -> RunSpec:
    """Derive the open values (None or "auto") of a spec that was built by hand, for this machine."""
    return resolve_on(spec, detect_machine(), None).spec


def prepare_data(spec: RunSpec, report: Callable[[str], None] = lambda line: None) -> RunSpec:
    """Prepare the training data of a spec, or find it in the cache; return the spec with its files and vocabulary.

    Args:
        spec: A resolved spec.
        report: Called with a line before each step that takes time.

    Raises:
        DataError: The data or the tokenizer cannot be used.
        HubError: A name on the Hugging Face Hub cannot be used.
        ValueError: `model.vocab_size` is smaller than the tokenizer's vocabulary.
    """
    from megalaunch.data.prepare import prepare

    spec = pin_hub_names(spec)
    local = fetch_hub_files(spec, begun=False, say=report)
    return apply_prepared(spec, prepare(local.data, local.tokenizer, report), spec.model.vocab_size)
