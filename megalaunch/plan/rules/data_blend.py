"""Rules of blends, splits, documents and fill-in-the-middle."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from megalaunch.plan.rules.data import blend_entry
from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.schema.data import named_sources

_SPLIT = re.compile(r"\s*\d{1,18}(\.\d{1,18})?\s*")


def _blends(at: RuleContext) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the key and the entries of both blends, if given."""
    for key in ("blend", "validation_blend"):
        entries = getattr(at.spec.data, key)
        if entries:
            yield f"data.{key}", entries


@rule("data.blend_form", "An entry of a blend is PREFIX or WEIGHT PREFIX.")
def blend_form(at: RuleContext) -> Iterator[Violation]:
    """A number alone is a weight without a prefix."""
    for key, entries in _blends(at):
        wrong = [entry for entry in entries if not entry.strip() or _is_number(entry)]
        if wrong:
            rest = tuple(entry for entry in entries if entry not in wrong)
            yield Violation(
                key,
                f"{wrong[0]!r} is not an entry of a blend: write PREFIX, or WEIGHT PREFIX in quotes ('0.3 PREFIX')",
                fixes=({key: rest},) if rest else (),
            )


@rule("data.blend_weights", "Either all entries of a blend have a weight, or none has.")
def blend_weights(at: RuleContext) -> Iterator[Violation]:
    """Without weights each prefix is weighted by its size, which cannot be mixed with given weights."""
    for key, entries in _blends(at):
        weights = [blend_entry(entry)[0] for entry in entries]
        if None in weights and any(weight is not None for weight in weights):
            bare = next(entry for entry, weight in zip(entries, weights, strict=True) if weight is None)
            yield Violation(
                key,
                f"{bare!r} has no weight, but other entries have one",
                fixes=({key: tuple(blend_entry(entry)[1] for entry in entries)},),
            )


@rule("data.blend_positive", "The weights of a blend are above 0.")
def blend_positive(at: RuleContext) -> Iterator[Violation]:
    """Remove an entry instead of giving it the weight 0."""
    for key, entries in _blends(at):
        wrong = [entry for entry in entries if not _is_positive(blend_entry(entry)[0])]
        if wrong:
            rest = tuple(entry for entry in entries if entry not in wrong)
            yield Violation(
                key, f"the weight of {wrong[0]!r} is not a number above 0", fixes=({key: rest},) if rest else ()
            )


@rule("data.blend_twice", "A blend has each prefix once.")
def blend_twice(at: RuleContext) -> Iterator[Violation]:
    """Two entries repeat the samples of a prefix in two orders; a larger weight says the same."""
    for key, entries in _blends(at):
        prefixes = [blend_entry(entry)[1] for entry in entries]
        twice = next((prefix for prefix in prefixes if prefixes.count(prefix) > 1), None)
        if twice is not None:
            yield Violation(
                key,
                f"{twice} is listed {prefixes.count(twice)} times",
                {"prefix": twice},
                ({key: tuple(entry for n, entry in enumerate(entries) if prefixes[n] not in prefixes[:n])},),
                severity="warning",
            )


@rule("data.validation_seen", "Validation data is not trained on.")
def validation_seen(at: RuleContext) -> Iterator[Violation]:
    """The loss on training data does not measure generalisation."""
    data = at.spec.data
    trained = {blend_entry(entry)[1] for entry in data.blend} | ({data.train_prefix} - {None})
    seen = [entry for entry in data.validation_blend if blend_entry(entry)[1] in trained]
    if seen:
        rest = tuple(entry for entry in data.validation_blend if entry not in seen)
        yield Violation(
            "data.validation_blend",
            f"{blend_entry(seen[0])[1]} is also trained on; data.split splits one prefix",
            fixes=({"data.validation_blend": rest}, {"data.validation_blend": (), "data.split": "969,30,1"}),
            severity="warning",
        )


def _shares(at: RuleContext) -> list[float] | None:
    """Return the numbers of a split, or None if it is not valid."""
    split = at.spec.data.split
    if split is None or not all(_SPLIT.fullmatch(part) for part in split.split(",")):
        return None
    return [float(part) for part in split.split(",")]


@rule("data.split_form", "data.split is up to three numbers: training, validation, test.")
def split_form(at: RuleContext) -> Iterator[Violation]:
    """Megatron-LM's notation, `969,30,1`, in any unit."""
    split, shares = at.spec.data.split, _shares(at)
    if split is not None and (shares is None or len(shares) > 3):
        yield Violation(
            "data.split",
            f"{split!r} is not a split: write up to three numbers, as in 969,30,1",
            fixes=({"data.split": "969,30,1"}, {"data.split": None}),
        )


@rule("data.split_trains", "The training part of data.split is above 0.")
def split_trains(at: RuleContext) -> Iterator[Violation]:
    """It is the first number."""
    shares = _shares(at)
    if shares is not None and shares[0] == 0:
        yield Violation(
            "data.split",
            f"split {at.spec.data.split} leaves no training data: its first number is 0",
            fixes=({"data.split": "969,30,1"}, {"data.split": None}),
        )


register_inert(
    InertSetting(
        "data.split_idle",
        "data.split is set only for prepared tokens.",
        "A corpus is split by documents (data.validation_every); mock data is not split.",
        ("data.split",),
        "data.train_prefix",
        lambda spec: not {"corpus", "sft_data", "mock"} & set(named_sources(spec.data)),
        "it splits prepared tokens (data.train_prefix, data.blend)",
    )
)
register_inert(
    InertSetting(
        "data.validation_blend_idle",
        "data.validation_blend is set only for text.",
        "Conversations and mock data have validation data of their own kind.",
        ("data.validation_blend",),
        "data.train_prefix",
        lambda spec: not {"sft_data", "mock"} & set(named_sources(spec.data)),
        "conversations and mock data have validation data of their own kind",
    )
)
register_inert(
    InertSetting(
        "data.template_idle",
        "data.chat_template is set only for conversations.",
        "data.sft_data gives them.",
        ("data.chat_template",),
        "data.sft_data",
        lambda spec: spec.data.sft_data is not None,
        "there are no conversations (data.sft_data is null)",
    )
)
register_inert(
    InertSetting(
        "data.documents_idle",
        "Settings of documents and of fill-in-the-middle are set only for text.",
        "Conversations never attend to each other, and only their answers count in the loss.",
        ("data.reset_position_ids", "data.reset_attention_mask", "data.eod_mask_loss", "data.fim_rate"),
        "data.sft_data",
        lambda spec: spec.data.sft_data is None,
        "the data are conversations (data.sft_data), which are always separate",
    )
)
register_inert(
    InertSetting(
        "data.fim_idle",
        "fim_spm_rate and fim_tokens are set only with fill-in-the-middle.",
        "data.fim_rate enables it.",
        ("data.fim_spm_rate", "data.fim_tokens"),
        "data.fim_rate",
        lambda spec: spec.data.fim_rate > 0,
        "fill-in-the-middle is off (data.fim_rate is 0)",
    )
)


@rule("data.fim_mock", "Fill-in-the-middle is off for mock data.")
def fim_mock(at: RuleContext) -> Iterator[Violation]:
    """Mock tokens have no text to split."""
    if at.spec.data.fim_rate > 0 and at.spec.data.mock:
        yield Violation(
            "data.fim_rate",
            "fill-in-the-middle splits text, but mock tokens have none (data.mock)",
            {"fim_rate": at.spec.data.fim_rate},
            ({"data.fim_rate": 0.0},),
        )


@rule("data.fim_tokenizer", "The tokenizer has tokens for fill-in-the-middle.")
def fim_tokenizer(at: RuleContext) -> Iterator[Violation]:
    """A tokenizer trained on the corpus has only an end-of-document token."""
    data = at.spec.data
    if data.fim_rate > 0 and data.corpus is not None and at.spec.tokenizer.path is None:
        yield Violation(
            "data.fim_rate",
            "a tokenizer trained on the corpus has no tokens for prefix, middle and suffix: give tokenizer.path",
            {"fim_rate": data.fim_rate},
            ({"data.fim_rate": 0.0},),
        )


@rule("data.fim_marks", "data.fim_tokens has three different tokens.")
def fim_marks(at: RuleContext) -> Iterator[Violation]:
    """They precede prefix, middle and suffix."""
    data = at.spec.data
    if data.fim_rate > 0 and data.fim_tokens and (len(data.fim_tokens) != 3 or len(set(data.fim_tokens)) != 3):
        yield Violation(
            "data.fim_tokens",
            f"fim_tokens needs three different tokens, but has {len(set(data.fim_tokens))}",
            {"fim_tokens": list(data.fim_tokens)},
            ({"data.fim_tokens": ()},),
        )


@rule("data.documents_end", "data.append_eod is on if documents are separated.")
def documents_end(at: RuleContext) -> Iterator[Violation]:
    """Documents are separated at their end-of-document token."""
    data = at.spec.data
    if data.append_eod or data.corpus is None:
        return
    for key in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if getattr(data, key):
            fixes: tuple[Fix, ...] = ({"data.append_eod": True}, {f"data.{key}": False})
            yield Violation(
                f"data.{key}", f"{key} needs data.append_eod: without it documents have no end token", fixes=fixes
            )


@rule("data.positions_apart", "reset_position_ids is on only with reset_attention_mask.")
def positions_apart(at: RuleContext) -> Iterator[Violation]:
    """With attention across documents, tokens of two documents have the same position."""
    data = at.spec.data
    if data.reset_position_ids and not data.reset_attention_mask and data.sft_data is None:
        yield Violation(
            "data.reset_position_ids",
            "reset_position_ids restarts positions in each document, but attention crosses documents "
            "(data.reset_attention_mask is off)",
            fixes=({"data.reset_attention_mask": True}, {"data.reset_position_ids": False}),
            severity="warning",
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_positive(weight: str | None) -> bool:
    return weight is None or (math.isfinite(float(weight)) and float(weight) > 0)
