"""The data of a rehearsal: generated text, conversations or token files, in the form of the run's own data.

The run's own files are only opened: their token ids are beyond the small vocabulary, and on a laptop they are missing.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalaunch.data.prepare import PreparedData, data_overrides, prepare
from megalaunch.data.samples.blended_dataset import parse_blend
from megalaunch.data.samples.validation_sets import parse_validation_sets
from megalaunch.runs.rehearsal.own_files import describe_own_files
from megalaunch.runs.rehearsal.shrink import Change
from megalaunch.runs.rehearsal.small_model import VOCABULARY
from megalaunch.schema import RunSpec, with_values
from megalaunch.schema.data import DataSpec
from megalaunch.schema.tokenizer import TokenizerSpec

_WORDS = (
    "the a one every some model layer token gradient loss step rank batch sequence head weight learns reads adds "
    "sends waits splits joins small large early late first last again slowly together then and or but"
)
_DOCUMENTS, _CONVERSATIONS = 400, 200
_VALIDATION_EVERY = 4
_MOST_BLENDED = 4
GENERATED = "generated"
_FILES = ("corpus", "sft_data", "train_prefix", "validation_prefix", "blend", "validation_blend")
_FIM_TOKENS = ("!", '"', "#")  # single bytes, which the generated text does not contain


def prepare_small_data(spec: RunSpec, folder: Path) -> tuple[RunSpec, str]:
    """Generate the data of a shrunk spec in `folder` and prepare it as `train` does.

    Returns:
        The spec with the paths of the prepared data; in words what was prepared and whether the run's own is here.

    Raises:
        DataError: the data cannot be prepared.
    """
    folder.mkdir(parents=True, exist_ok=True)
    small = small_section(spec.data)
    no_files: dict[str, Any] = {key: () if isinstance(getattr(small, key), tuple) else None for key in _FILES}
    no_files["validation_sets"] = ()
    data = replace(small, **no_files, cache_directory=str(folder / "cache"))
    corpus = replace(data, corpus=str(_write_text(folder, data)))
    text = prepare(
        replace(corpus, validation_every=_VALIDATION_EVERY), TokenizerSpec(vocab_size=VOCABULARY), _say_nothing
    )
    tokenizer = TokenizerSpec(path=str(text.tokenizer_path))
    if spec.data.sft_data is not None:
        chat = replace(data, sft_data=str(_write_conversations(folder)))
        prepared, what = prepare(chat, tokenizer, _say_nothing), f"{_CONVERSATIONS} conversations"
    elif spec.data.blend or spec.data.train_prefix is not None:
        data = _copies(small, data, text, folder)
        prepared, what = prepare(data, tokenizer, _say_nothing), _describe_files(data)
    else:
        if not spec.data.validation_every:
            text = prepare(corpus, tokenizer, _say_nothing)
        prepared, what = text, f"{text.documents + text.validation_documents} documents of text"
    placed = with_values(spec, {f"data.{name}": value for name, value in vars(data).items()})
    placed = with_values(placed, data_overrides(prepared))
    sets = (f"{name} {text.train_prefix}" for name in parse_validation_sets(spec.data.validation_sets))
    placed = with_values(placed, {"data.validation_sets": tuple(sets)})
    what = f"{what}, {prepared.train_tokens:,} tokens, vocabulary {prepared.vocab_size}"
    return placed, "; ".join(filter(None, [what, describe_own_files(spec)]))


def data_changes(spec: RunSpec) -> Iterator[Change]:
    """Yield every key of the data and tokenizer that differs in a rehearsal, besides directories."""
    small = small_section(spec.data)
    for key, before in vars(spec.data).items():
        if getattr(small, key) != before:
            yield Change(f"data.{key}", before, getattr(small, key))
    if spec.tokenizer.path is not None:
        yield Change("tokenizer.path", spec.tokenizer.path, GENERATED)


def small_section(data: DataSpec) -> DataSpec:
    """Return the data section of a rehearsal, with GENERATED in place of each file."""
    values: dict[str, Any] = {key: _generated(getattr(data, key)) for key in _FILES}
    if not any(values.values()):
        values["corpus"] = GENERATED  # mock tokens are of no tokenizer, which generation needs
    values["validation_sets"] = tuple(f"{name} {GENERATED}" for name in parse_validation_sets(data.validation_sets))
    if data.validation_every and not (data.blend or data.train_prefix):
        values["validation_every"] = _VALIDATION_EVERY
    return replace(
        data,
        **values,
        mock=False if data.mock else data.mock,
        # The other templates need tokens that a tokenizer trained on text does not have.
        chat_template=data.chat_template if data.sft_data is None else "plain",
        fim_tokens=_FIM_TOKENS if data.fim_rate > 0 else (),
        add_special_tokens=True,
    )


def _generated(files: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    if isinstance(files, tuple):
        weights = [entry.weight for entry in parse_blend(files[:_MOST_BLENDED])]
        return tuple(GENERATED if weight is None else f"{weight:g} {GENERATED}" for weight in weights)
    return None if files is None else GENERATED


def _say_nothing(line: str) -> None:
    """Drop the progress of a preparation of a second."""


def _sentences(count: int) -> Iterator[str]:
    generator, words = random.Random(0), _WORDS.split()
    for _ in range(count):
        yield " ".join(generator.choices(words, k=generator.randint(8, 120))) + "."


def _write_text(folder: Path, data: DataSpec) -> Path:
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({data.json_key: text}) + "\n" for text in _sentences(_DOCUMENTS)))
    return path


def _write_conversations(folder: Path) -> Path:
    path = folder / "conversations.jsonl"
    texts = list(_sentences(2 * _CONVERSATIONS))
    roles = zip(texts[::2], texts[1::2], strict=True)
    lines = (
        json.dumps({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}) + "\n"
        for asked, answer in roles
    )
    path.write_text("".join(lines))
    return path


def _copies(asked: DataSpec, small: DataSpec, text: PreparedData, folder: Path) -> DataSpec:
    """Return the data section with small token files where the run has its own, and as many in a blend."""
    assert text.train_prefix is not None, "a corpus is prepared as a token file"

    def copy(name: str) -> str:
        return str(_copy_tokens(text.train_prefix, folder / name))

    def blend(entries: tuple[str, ...], name: str) -> tuple[str, ...]:
        weights = [entry.weight for entry in parse_blend(entries)]
        return tuple(
            copy(f"{name}_{index}") if weight is None else f"{weight:g} {copy(f'{name}_{index}')}"
            for index, weight in enumerate(weights)
        )

    return replace(
        small,
        train_prefix=None if asked.train_prefix is None else copy("train"),
        validation_prefix=None if asked.validation_prefix is None else copy("validation"),
        blend=blend(asked.blend, "blend"),
        validation_blend=blend(asked.validation_blend, "validation_blend"),
    )


def _copy_tokens(source: Path | None, target: Path) -> Path:
    assert source is not None, "the caller has it"
    for suffix in (".bin", ".idx"):
        shutil.copyfile(f"{source}{suffix}", f"{target}{suffix}")
    return target


def _describe_files(data: DataSpec) -> str:
    count = len(data.blend) or 1
    return f"{count} token file{'s' if count > 1 else ''}"
