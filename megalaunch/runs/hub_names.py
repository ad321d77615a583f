"""Names on the Hugging Face Hub in a run spec (`hf://org/name`): pin them to commits, download what a run needs.

A pinned spec is complete: model files are named by their path in the cache, data by a name with a commit, and
`run.hub_revisions` lists what each key stood for, so that a resume uses the same commits, without a network too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megalaunch.hub.name import HubError, HubName, Kind, is_same_source, parse_hub_name
from megalaunch.schema import RunSpec, with_values
from megalaunch.schema.paths import value_at
from megalaunch.schema.remote import is_hub_address

if TYPE_CHECKING:
    from megalaunch.hub.snapshot import Part

KEY = "run.hub_revisions"
_WEIGHTS, _MODEL = "checkpoint.load_pretrained", "model"
_FILES: Mapping[str, Kind] = {"tokenizer.path": "model", _WEIGHTS: "model"}
_TEXTS = ("data.corpus", "data.sft_data")
_TOKENS = ("data.train_prefix", "data.validation_prefix", "data.blend", "data.validation_blend", "data.validation_sets")


def pin_hub_names(spec: RunSpec, model: str = "", stored: RunSpec | None = None) -> RunSpec:
    """Return the spec with every name pinned to a commit; configuration and tokenizer files are downloaded.

    Args:
        spec: The resolved spec.
        model: The option of the config group `model`.
        stored: The spec of a begun run: a name without a revision keeps the commit with which the run began.

    Raises:
        HubError: Names that cannot be used, all of them at once.
    """
    used: list[str] = [entry for entry in spec.run.hub_revisions if entry.startswith(f"{_MODEL}=")]
    values: dict[str, Any] = {}
    problems: list[HubError] = []
    for key, word in _names(spec, model):
        try:
            pinned, value = _pin(key, word, stored)
        except HubError as error:
            problems.append(HubError(f"{key}: {error.cause}", error.fix))
            continue
        used.append(f"{key}={pinned}")
        if key != _MODEL:
            values[key] = _replace_word(values.get(key, value_at(spec, key)), word, value)
    if problems:
        raise HubError("\n".join(one.cause for one in problems), "\n".join(dict.fromkeys(one.fix for one in problems)))
    if not used:
        return spec
    return with_values(spec, {**values, KEY: tuple(dict.fromkeys((*used, *_kept(spec, used))))})


def pin_model_option(overrides: Sequence[str], model: str, stored: RunSpec) -> list[str] | None:
    """Return the overrides with `model=hf://...` at the commit with which the run began; None if nothing changes."""
    if not is_hub_address(model):
        return None
    begun = _stored_names(_MODEL, parse_hub_name(model, "model"), stored)
    if begun is None or str(begun) == model:
        return None
    return [f"{_MODEL}={begun}" if override.lstrip("+") == f"{_MODEL}={model}" else override for override in overrides]


def fetch_hub_files(spec: RunSpec, begun: bool, say: Callable[[str], None]) -> RunSpec:
    """Download data and weights of a pinned spec; return the spec with local paths, to prepare its data.

    Args:
        spec: From `pin_hub_names`.
        begun: The run has a checkpoint of its own, and needs no other weights.
        say: Called with a line before each download.

    Raises:
        HubError: A file is neither in the cache nor to be had.
    """
    from megalaunch.hub.snapshot import fetch

    values: dict[str, Any] = {}
    for entry in spec.run.hub_revisions:
        key, _, text = entry.partition("=")
        if key == _MODEL or (key == _WEIGHTS and begun):
            continue
        name = parse_hub_name(text, "model")
        part: Part = "weights" if key == _WEIGHTS else "config" if key in _FILES else "data"
        if part != "config":
            say(f"{name}: downloading what is not in the cache")
        path = fetch(name, part).path
        values[key] = _replace_word(values.get(key, value_at(spec, key)), str(name), str(path))
    return with_values(spec, values)


def _names(spec: RunSpec, model: str) -> Iterator[tuple[str, str]]:
    """Yield (key, name) for every name in the spec, and for the model option."""
    if is_hub_address(model):
        yield _MODEL, model
    for key in (*_FILES, *_TEXTS, *_TOKENS):
        value = value_at(spec, key)
        for text in value if isinstance(value, tuple) else [value or ""]:
            word = text.split(" ")[-1] if key in _TOKENS else text  # after the weight of an entry
            if is_hub_address(word):
                yield key, word


def _pin(key: str, word: str, stored: RunSpec | None) -> tuple[HubName, str]:
    """Return the name with its commit, and the value of the key in a pinned spec."""
    from megalaunch.hub.snapshot import fetch

    typed = parse_hub_name(word, "model" if key in _FILES or key == _MODEL else "dataset")
    begun = _stored_names(key, typed, stored) if stored is not None else None
    name = begun or typed
    if key == _MODEL or key in _FILES:
        try:
            snapshot = fetch(name, "config")
        except HubError:
            if key == _WEIGHTS and begun is not None and stored is not None:  # its checkpoints have the weights
                return begun, str(stored.checkpoint.load_pretrained)
            raise
        return snapshot.name, str(snapshot.path)
    if key in _TOKENS and begun is not None:
        return begun, str(fetch(begun, "data").path)
    pinned = name if name.commit else fetch(name, "commit").name
    return pinned, str(pinned)


def _stored_names(key: str, typed: HubName, stored: RunSpec) -> HubName | None:
    """Return what a key of a begun run stood for, if the typed name may mean it."""
    for entry in stored.run.hub_revisions:
        stored_key, _, text = entry.partition("=")
        if stored_key == key and is_same_source(typed, parse_hub_name(text, "model")):
            return parse_hub_name(text, "model")
    return None


def _kept(spec: RunSpec, used: Sequence[str]) -> Iterator[str]:
    """Yield the entries of a spec that was pinned before, of keys that hold paths by now."""
    keys = {entry.partition("=")[0] for entry in used}
    yield from (entry for entry in spec.run.hub_revisions if entry.partition("=")[0] not in keys)


def _replace_word(value: Any, word: str, by: str) -> Any:
    """Replace a name in the value of a key; in a list, in the entries that end with it."""
    if isinstance(value, tuple):
        return tuple(f"{entry.removesuffix(word)}{by}" if entry.endswith(word) else entry for entry in value)
    return by
