"""Rules of where the data comes from. Files are looked for here only when a run is about to start on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megalaunch.plan.rules.registry import Broken, Situation, rule


@rule("data.source", "There is one source of training text: data.corpus or data.train_prefix.")
def source(at: Situation) -> Iterator[Broken]:
    """Neither is a plan that still lacks its data; both is a contradiction."""
    data = at.spec.data
    if data.corpus is None and data.train_prefix is None:
        message = "no data is named: data.corpus=FILE|FOLDER|GLOB for text, or data.train_prefix=PREFIX for tokens"
        yield Broken("data.corpus", message, severity=at.before_launch)
    elif data.corpus is not None and data.train_prefix is not None:
        yield Broken(
            "data.train_prefix",
            f"both are given, data.corpus={data.corpus} and data.train_prefix={data.train_prefix}",
            fixes=({"data.train_prefix": None, "data.validation_prefix": None}, {"data.corpus": None}),
        )


@rule("data.validation_source", "data.validation_prefix goes with data.train_prefix.")
def validation_source(at: Situation) -> Iterator[Broken]:
    """A corpus makes its own validation split."""
    data = at.spec.data
    if data.validation_prefix is not None and data.train_prefix is None:
        yield Broken(
            "data.validation_prefix",
            "is given without data.train_prefix; a corpus makes its own split (data.validation_every)",
            fixes=({"data.validation_prefix": None},),
        )


@rule("data.tokens_exist", "Prepared tokens are where their prefix says.")
def tokens_exist(at: Situation) -> Iterator[Broken]:
    """A prefix stands for two files."""
    data = at.spec.data
    for name, prefix in (("train_prefix", data.train_prefix), ("validation_prefix", data.validation_prefix)):
        missing = [end for end in (".bin", ".idx") if prefix and not _is_file(f"{prefix}{end}")]
        if missing:
            files = " and ".join(f"{prefix}{end}" for end in missing)
            yield Broken(f"data.{name}", f"there is no {files} on this machine", severity=at.before_launch)


@rule("tokenizer.path", "A given tokenizer is where its path says.")
def tokenizer_path(at: Situation) -> Iterator[Broken]:
    """A tokenizer.json, or a folder that holds one."""
    path = at.spec.tokenizer.path
    if path is not None and not (_is_file(path) or _is_file(f"{path}/tokenizer.json")):
        yield Broken("tokenizer.path", f"there is no {path} on this machine", severity=at.before_launch)


@rule("tokenizer.of_tokens", "Prepared tokens come with the tokenizer that made them.")
def of_tokens(at: Situation) -> Iterator[Broken]:
    """Its end-of-document token and its vocabulary are needed."""
    if at.spec.data.train_prefix is not None and at.spec.tokenizer.path is None:
        message = "data.train_prefix needs the tokenizer.json that made its tokens: tokenizer.path=PATH"
        yield Broken("tokenizer.path", message, severity=at.before_launch)


def _is_file(path: str) -> bool:
    try:
        return Path(path).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, no such home
        return False
