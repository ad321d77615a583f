"""Rules of where the data comes from. Files are looked for here only when a run is about to start on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megalaunch.config.schema.data import DataSpec
from megalaunch.config.schema.remote import is_hub_name
from megalaunch.plan.findings import as_override
from megalaunch.plan.rules.no_effect import defaults
from megalaunch.plan.rules.registry import RuleContext, Violation, rule

_SOURCES = {
    "corpus": "data.corpus=FILE|FOLDER|GLOB for text",
    "train_prefix": "data.train_prefix=PREFIX for tokens",
}


def sources(data: DataSpec) -> tuple[str, ...]:
    """The keys of `data` that name training text, of those that are given."""
    given = {
        "corpus": data.corpus is not None,
        "sft_data": data.sft_data is not None,
        "train_prefix": data.train_prefix is not None,
        "blend": bool(data.blend),
        "mock": data.mock,
    }
    return tuple(key for key, is_given in given.items() if is_given)


def _absent(keys: Iterable[str]) -> dict[str, Any]:
    return {f"data.{key}": defaults()[f"data.{key}"] for key in keys}


@rule(
    "data.source",
    "There is one source of training text: a corpus, conversations, prepared tokens, a blend, or made up.",
)
def source(at: RuleContext) -> Iterator[Violation]:
    """None is a plan that still lacks its data; two are a contradiction."""
    data = at.spec.data
    given = sources(data)
    if not given:
        yield Violation(
            "data.corpus", f"no data is named: {', or '.join(_SOURCES.values())}", severity=at.pre_launch_severity
        )
    elif len(given) > 1:
        # Of each source alone: the others go, with the validation prefix of prepared tokens.
        alone = [[key for key in given if key != kept] for kept in given]
        with_prefix = ["validation_prefix"] if data.validation_prefix is not None else []
        fixes = [
            _absent([*others, *(with_prefix if "train_prefix" in others else [])])
            for others in sorted(alone, key=lambda others: "corpus" in others)
        ]
        shown = " and ".join(f"data.{key}={as_override(getattr(data, key))}" for key in given)
        yield Violation(f"data.{given[-1]}", f"two sources are given, {shown}", {"sources": list(given)}, tuple(fixes))


@rule("data.validation_source", "data.validation_prefix goes with data.train_prefix.")
def validation_source(at: RuleContext) -> Iterator[Violation]:
    """A corpus makes its own validation split, and a blend has data.validation_blend or data.split."""
    data = at.spec.data
    if data.validation_prefix is not None and data.train_prefix is None:
        yield Violation(
            "data.validation_prefix",
            "is given without data.train_prefix; a corpus makes its own split (data.validation_every)",
            fixes=({"data.validation_prefix": None},),
        )


@rule("data.validation_twice", "There is one source of validation text.")
def validation_twice(at: RuleContext) -> Iterator[Violation]:
    """A prefix, a blend, or a part of the training prefixes."""
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
            f"validation text is named more than once: {' and '.join(f'data.{key}' for key in named)}",
            fixes=tuple(_absent([key for key in named if key != kept]) for kept in named),
        )


@rule("data.mock_vocab", "Made-up tokens have a vocabulary.")
def mock_vocab(at: RuleContext) -> Iterator[Violation]:
    """There is no tokenizer that would say how many tokens there are."""
    if at.spec.data.mock and at.spec.model.vocab_size is None:
        yield Violation(
            "model.vocab_size",
            "data.mock makes tokens up, and needs model.vocab_size to know how many there are",
            fixes=({"model.vocab_size": 32768},),
        )


@rule("data.tokens_exist", "Prepared tokens are where their prefix says.")
def tokens_exist(at: RuleContext) -> Iterator[Violation]:
    """A prefix stands for two files."""
    for key, prefix in dict.fromkeys(_prefixes(at.spec.data)):
        missing = [end for end in (".bin", ".idx") if not _is_file(f"{prefix}{end}")]
        if missing:
            files = " and ".join(f"{prefix}{end}" for end in missing)
            yield Violation(f"data.{key}", f"there is no {files} on this machine", severity=at.pre_launch_severity)


@rule("data.stored_ids", "Stored tokens are numbers wide enough for the vocabulary.")
def stored_ids(at: RuleContext) -> Iterator[Violation]:
    """Ids of 16 bits end at 65535: with a larger vocabulary the tokens are another tokenizer's, or were cut."""
    vocab = at.spec.model.vocab_size
    for key, prefix in _prefixes(at.spec.data):
        largest = _LARGEST.get(_stored_type(prefix) or 0)
        if largest is not None and vocab is not None and vocab > largest + 1:
            yield Violation(
                f"data.{key}",
                f"{prefix} stores ids up to {largest}, and the vocabulary has {vocab}: "
                "were its tokens made by this tokenizer?",
                {"largest": largest, "vocab_size": vocab},
                severity="warning",
            )


@rule("tokenizer.path", "A given tokenizer is where its path says.")
def tokenizer_path(at: RuleContext) -> Iterator[Violation]:
    """A tokenizer.json, or a folder that holds one."""
    path = at.spec.tokenizer.path
    if path is not None and not (_is_file(path) or _is_file(f"{path}/tokenizer.json")):
        message = f"there is no {path} on this machine"
        if is_hub_name(path):
            message += "; of a tokenizer on a hub download its tokenizer.json first, and name that file"
        yield Violation("tokenizer.path", message, severity=at.pre_launch_severity)


@rule("tokenizer.of_tokens", "Prepared tokens come with the tokenizer that made them.")
def of_tokens(at: RuleContext) -> Iterator[Violation]:
    """Its end-of-document token and its vocabulary are needed."""
    data = at.spec.data
    if (data.train_prefix is not None or data.blend) and at.spec.tokenizer.path is None:
        key = "train_prefix" if data.train_prefix is not None else "blend"
        message = f"data.{key} needs the tokenizer.json that made its tokens: tokenizer.path=PATH"
        yield Violation("tokenizer.path", message, severity=at.pre_launch_severity)


_LARGEST = {1: 2**8 - 1, 8: 2**16 - 1}
"""By Megatron's code of a token type: the largest id, of those that a vocabulary may outgrow."""


def _prefixes(data: DataSpec) -> Iterator[tuple[str, str]]:
    """Every prepared prefix with the key that names it."""
    for key in ("train_prefix", "validation_prefix"):
        prefix = getattr(data, key)
        if prefix:
            yield key, prefix
    for key, entries in (("blend", data.blend), ("validation_blend", data.validation_blend)):
        for entry in entries:
            prefix = blend_entry(entry)[1]
            if prefix:
                yield key, prefix


def blend_entry(entry: str) -> tuple[str | None, str]:
    """The weight (as written) and the prefix of `PREFIX` or `WEIGHT PREFIX`."""
    first, _, rest = entry.strip().partition(" ")
    if not rest.strip():
        return None, first
    try:
        float(first)
    except ValueError:
        return None, entry.strip()
    return first, rest.strip()


def _stored_type(prefix: str) -> int | None:
    """The code of the token type in an index file's header: behind nine bytes of magic and eight of version."""
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
