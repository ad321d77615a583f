"""Rules of data sources and tokenizers. A missing file is an error only if the run is about to start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megalaunch.plan.findings import as_override
from megalaunch.plan.rules.no_effect import defaults
from megalaunch.plan.rules.registry import RuleContext, Violation, rule
from megalaunch.schema.data import HOW_TO_NAME_DATA, DataSpec, named_sources
from megalaunch.schema.remote import is_hub_address, is_hub_name


def _absent(keys: Iterable[str]) -> dict[str, Any]:
    return {f"data.{key}": defaults()[f"data.{key}"] for key in keys}


@rule(
    "data.source",
    "There is one source of training data: a corpus, conversations, prepared tokens, a blend or mock data.",
)
def source(at: RuleContext) -> Iterator[Violation]:
    """Without a source a run trains on mock tokens, unless they are refused; two sources contradict each other."""
    data = at.spec.data
    given = named_sources(data)
    if not given:
        yield Violation(
            "data.mock",
            f"no training data is given, and data.mock=false refuses mock tokens: {HOW_TO_NAME_DATA}",
            fixes=({"data.mock": None},),
        )
    elif len(given) > 1:
        # One fix per source: remove all others, and with prepared tokens their validation prefix. The fix that keeps
        # the corpus is last: shipped recipes name a corpus, so the other source is the one that was added.
        alone = [[key for key in given if key != only] for only in given]
        with_prefix = ["validation_prefix"] if data.validation_prefix is not None else []
        fixes = [
            _absent([*others, *(with_prefix if "train_prefix" in others else [])])
            for others in sorted(alone, key=lambda others: "corpus" not in others)
        ]
        shown = " and ".join(f"data.{key}={as_override(getattr(data, key))}" for key in given)
        yield Violation(f"data.{given[-1]}", f"two sources are given, {shown}", {"sources": list(given)}, tuple(fixes))


@rule("data.validation_source", "data.validation_prefix is set only with data.train_prefix.")
def validation_source(at: RuleContext) -> Iterator[Violation]:
    """A corpus is split by data.validation_every, a blend by data.validation_blend or data.split."""
    data = at.spec.data
    if data.validation_prefix is not None and data.train_prefix is None:
        yield Violation(
            "data.validation_prefix",
            "data.validation_prefix needs data.train_prefix; a corpus is split by data.validation_every",
            fixes=({"data.validation_prefix": None},),
        )


@rule("data.validation_twice", "There is one source of validation data.")
def validation_twice(at: RuleContext) -> Iterator[Violation]:
    """It is a prefix, a blend, or a part of the training prefixes."""
    data = at.spec.data
    one_file = data.train_prefix is not None and data.validation_prefix == data.train_prefix
    given = {
        "validation_prefix": data.validation_prefix is not None,
        "validation_blend": bool(data.validation_blend),
        "split": data.split is not None and not one_file,
    }
    named = [key for key, is_given in given.items() if is_given]
    if len(named) > 1:
        yield Violation(
            f"data.{named[-1]}",
            f"validation data is given more than once: {' and '.join(f'data.{key}' for key in named)}",
            fixes=tuple(_absent([key for key in named if key != only]) for only in named),
        )


@rule("data.tokens_exist", "The .bin and .idx files of every prefix exist on this machine.")
def tokens_exist(at: RuleContext) -> Iterator[Violation]:
    """A prefix is the common path of both files."""
    for key, prefix in dict.fromkeys(_prefixes(at.spec.data)):
        if is_hub_address(prefix):
            continue
        missing = [end for end in (".bin", ".idx") if not _is_file(f"{prefix}{end}")]
        if missing:
            files = " and ".join(f"{prefix}{end}" for end in missing)
            yield Violation(f"data.{key}", f"there is no {files} on this machine", severity=at.pre_launch_severity)


@rule("data.stored_ids", "The dtype of stored tokens is wide enough for the vocabulary.")
def stored_ids(at: RuleContext) -> Iterator[Violation]:
    """16-bit ids end at 65535: with a larger vocabulary the tokens are another tokenizer's, or were truncated."""
    vocab = at.spec.model.vocab_size
    for key, prefix in _prefixes(at.spec.data):
        largest = _LARGEST.get(_stored_type(prefix) or 0)
        if largest is not None and vocab is not None and vocab > largest + 1:
            yield Violation(
                f"data.{key}",
                f"{prefix} stores ids up to {largest}, but the vocabulary has {vocab}: "
                "check that this tokenizer made its tokens",
                {"largest": largest, "vocab_size": vocab},
                severity="warning",
            )


@rule("tokenizer.path", "tokenizer.path exists on this machine.")
def tokenizer_path(at: RuleContext) -> Iterator[Violation]:
    """It is a tokenizer.json, or a folder with one; a name on the Hub is downloaded by a launch."""
    path = at.spec.tokenizer.path
    if path is not None and not is_hub_address(path) and not (_is_file(path) or _is_file(f"{path}/tokenizer.json")):
        message = f"there is no {path} on this machine"
        if is_hub_name(path):
            message += f"; a tokenizer of the Hugging Face Hub is hf://{path}"
        yield Violation("tokenizer.path", message, severity=at.pre_launch_severity)


@rule("tokenizer.of_tokens", "Prepared tokens are given with their tokenizer.")
def of_tokens(at: RuleContext) -> Iterator[Violation]:
    """Training needs its end-of-document token and its vocabulary."""
    data = at.spec.data
    if (data.train_prefix is not None or data.blend) and at.spec.tokenizer.path is None:
        key = "train_prefix" if data.train_prefix is not None else "blend"
        message = f"data.{key} needs the tokenizer.json that made its tokens: tokenizer.path=PATH"
        yield Violation("tokenizer.path", message, severity=at.pre_launch_severity)


_LARGEST = {1: 2**8 - 1, 8: 2**16 - 1}
"""Largest id by Megatron's dtype code, for the dtypes that may be too narrow for a vocabulary."""


def _prefixes(data: DataSpec) -> Iterator[tuple[str, str]]:
    """Yield every prefix of prepared tokens with its key."""
    for key in ("train_prefix", "validation_prefix"):
        prefix = getattr(data, key)
        if prefix:
            yield key, prefix
    sets = tuple(entry.strip().partition(" ")[2] for entry in data.validation_sets)
    blends = (("blend", data.blend), ("validation_blend", data.validation_blend), ("validation_sets", sets))
    for key, entries in blends:
        for entry in entries:
            prefix = blend_entry(entry)[1]
            if prefix:
                yield key, prefix


def blend_entry(entry: str) -> tuple[str | None, str]:
    """Return the weight (as text) and the prefix of `PREFIX` or `WEIGHT PREFIX`."""
    first, _, rest = entry.strip().partition(" ")
    if not rest.strip():
        return None, first
    try:
        float(first)
    except ValueError:
        return None, entry.strip()
    return first, rest.strip()


def _stored_type(prefix: str) -> int | None:
    """Return the dtype code in an index file's header: after nine bytes of magic and eight of version."""
    try:
        with Path(f"{prefix}.idx").expanduser().open("rb") as file:
            header = file.read(18)
    except (OSError, ValueError, RuntimeError):
        return None
    return header[17] if len(header) == 18 and header.startswith(b"MMIDIDX") else None


def _is_file(path: str) -> bool:
    try:
        return Path(path).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, no such home
        return False
