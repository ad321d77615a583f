"""The data of a rehearsal: generated text, conversations or token files, in the form of the run's own data.

The run's own files are not read: their token ids are beyond the small vocabulary, and on a laptop they are missing.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megalaunch.data.prepare import PreparedData, data_overrides, prepare
from megalaunch.data.samples.blended_dataset import parse_blend
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
_FIM_TOKENS = ("!", '"', "#")  # single bytes, which the generated text does not contain


def prepare_small_data(spec: RunSpec, folder: Path) -> tuple[RunSpec, str]:
    """Generate the data of a shrunk spec in `folder` and prepare it as `train` does.

    Returns:
        The spec with the paths of the prepared data, and what was prepared in words.

    Raises:
        DataError: the data cannot be prepared.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = replace(
        spec.data,
        mock=False,
        corpus=None,
        sft_data=None,
        train_prefix=None,
        validation_prefix=None,
        blend=(),
        validation_blend=(),
        cache_directory=str(folder / "cache"),
        fim_tokens=_FIM_TOKENS if spec.data.fim_rate > 0 else (),
        add_special_tokens=True,
    )
    corpus = replace(data, corpus=str(_write_text(folder, data)), validation_every=_VALIDATION_EVERY)
    text = prepare(corpus, TokenizerSpec(vocab_size=VOCABULARY), _say_nothing)
    tokenizer = TokenizerSpec(path=str(text.tokenizer_path))
    if spec.data.sft_data is not None:
        # The other templates need tokens that a tokenizer trained on text does not have.
        chat = replace(data, sft_data=str(_write_conversations(folder)), chat_template="plain")
        chat = replace(chat, validation_every=_VALIDATION_EVERY if spec.data.validation_every else 0)
        prepared, what = prepare(chat, tokenizer, _say_nothing), f"{_CONVERSATIONS} conversations"
    elif spec.data.blend or spec.data.train_prefix is not None:
        data = _copies(spec.data, data, text, folder)
        prepared, what = prepare(data, tokenizer, _say_nothing), _describe_files(data)
    else:
        if not spec.data.validation_every:
            text = prepare(replace(corpus, validation_every=0), tokenizer, _say_nothing)
        prepared, what = text, f"{text.documents + text.validation_documents} documents of text"
    placed = with_values(spec, {f"data.{name}": value for name, value in vars(data).items()})
    placed = with_values(placed, data_overrides(prepared))
    return placed, f"{what}, {prepared.train_tokens:,} tokens, vocabulary {prepared.vocab_size}"


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
        weights = [entry.weight for entry in parse_blend(entries)[:_MOST_BLENDED]]
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
