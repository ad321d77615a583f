"""Rules of how training text is mixed, split and shaped: blends, splits, fill-in-the-middle, documents."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from megalaunch.plan.rules.data import blend_entry, sources
from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule

_SPLIT = re.compile(r"\s*\d{1,18}(\.\d{1,18})?\s*")


def _blends(at: RuleContext) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Both blends, those that are given."""
    for key in ("blend", "validation_blend"):
        entries = getattr(at.spec.data, key)
        if entries:
            yield f"data.{key}", entries


@rule("data.blend_form", "An entry of a blend is PREFIX, or WEIGHT PREFIX.")
def blend_form(at: RuleContext) -> Iterator[Violation]:
    """A number alone is a weight without a prefix."""
    for key, entries in _blends(at):
        wrong = [entry for entry in entries if not entry.strip() or _is_number(entry)]
        if wrong:
            rest = tuple(entry for entry in entries if entry not in wrong)
            yield Violation(
                key,
                f"{wrong[0]!r} is no entry of a blend: PREFIX, or WEIGHT PREFIX in quotes ('0.3 PREFIX')",
                fixes=({key: rest},) if rest else (),
            )


@rule("data.blend_weights", "All entries of a blend have a weight, or none has.")
def blend_weights(at: RuleContext) -> Iterator[Violation]:
    """Without weights each prefix counts by its size, which is no weight beside others."""
    for key, entries in _blends(at):
        weights = [blend_entry(entry)[0] for entry in entries]
        if None in weights and any(weight is not None for weight in weights):
            bare = next(entry for entry, weight in zip(entries, weights, strict=True) if weight is None)
            yield Violation(
                key,
                f"{bare!r} has no weight, and other entries have",
                fixes=({key: tuple(blend_entry(entry)[1] for entry in entries)},),
            )


@rule("data.blend_positive", "Weights of a blend are above 0.")
def blend_positive(at: RuleContext) -> Iterator[Violation]:
    """What counts 0 is left out of the list."""
    for key, entries in _blends(at):
        wrong = [entry for entry in entries if not _is_positive(blend_entry(entry)[0])]
        if wrong:
            rest = tuple(entry for entry in entries if entry not in wrong)
            yield Violation(
                key, f"the weight of {wrong[0]!r} is no number above 0", fixes=({key: rest},) if rest else ()
            )


@rule("data.blend_twice", "A blend names each prefix once.")
def blend_twice(at: RuleContext) -> Iterator[Violation]:
    """Twice means samples that come twice as often, in two orders: a weight says that better."""
    for key, entries in _blends(at):
        prefixes = [blend_entry(entry)[1] for entry in entries]
        twice = next((prefix for prefix in prefixes if prefixes.count(prefix) > 1), None)
        if twice is not None:
            yield Violation(
                key,
                f"{twice} is named {prefixes.count(twice)} times",
                {"prefix": twice},
                ({key: tuple(entry for n, entry in enumerate(entries) if prefixes[n] not in prefixes[:n])},),
                severity="warning",
            )


@rule("data.validation_seen", "Validation text is not trained on.")
def validation_seen(at: RuleContext) -> Iterator[Violation]:
    """A loss on text that was learned by heart says nothing."""
    data = at.spec.data
    trained = {blend_entry(entry)[1] for entry in data.blend} | ({data.train_prefix} - {None})
    seen = [entry for entry in data.validation_blend if blend_entry(entry)[1] in trained]
    if seen:
        rest = tuple(entry for entry in data.validation_blend if entry not in seen)
        yield Violation(
            "data.validation_blend",
            f"{blend_entry(seen[0])[1]} is trained on as well; data.split divides one prefix",
            fixes=({"data.validation_blend": rest}, {"data.validation_blend": (), "data.split": "969,30,1"}),
            severity="warning",
        )


def _shares(at: RuleContext) -> list[float] | None:
    """The numbers of a split, or None where it is none."""
    split = at.spec.data.split
    if split is None or not all(_SPLIT.fullmatch(word) for word in split.split(",")):
        return None
    return [float(word) for word in split.split(",")]


@rule("data.split_form", "A split is up to three numbers: training, validation, test.")
def split_form(at: RuleContext) -> Iterator[Violation]:
    """As Megatron writes it: `969,30,1`, in any unit."""
    split, shares = at.spec.data.split, _shares(at)
    if split is not None and (shares is None or len(shares) > 3):
        yield Violation(
            "data.split",
            f"{split!r} is no split: up to three numbers, as in 969,30,1",
            fixes=({"data.split": "969,30,1"}, {"data.split": None}),
        )


@rule("data.split_trains", "Some of a split is trained on.")
def split_trains(at: RuleContext) -> Iterator[Violation]:
    """Its first number is above 0."""
    shares = _shares(at)
    if shares is not None and shares[0] == 0:
        yield Violation(
            "data.split",
            f"split {at.spec.data.split} leaves nothing to train on: its first number is 0",
            fixes=({"data.split": "969,30,1"}, {"data.split": None}),
        )


register_inert(
    InertSetting(
        "data.split_idle",
        "A split divides prepared tokens.",
        "A corpus is split by its documents (data.validation_every), made-up tokens not at all.",
        ("data.split",),
        "data.train_prefix",
        lambda spec: not {"corpus", "sft_data", "mock"} & set(sources(spec.data)),
        "it divides prepared tokens (data.train_prefix, data.blend)",
    )
)
register_inert(
    InertSetting(
        "data.validation_blend_idle",
        "Text is validated on beside text that is trained on.",
        "Conversations and made-up tokens have validation of their own kind.",
        ("data.validation_blend",),
        "data.train_prefix",
        lambda spec: not {"sft_data", "mock"} & set(sources(spec.data)),
        "conversations and made-up tokens are validated on their own kind",
    )
)
register_inert(
    InertSetting(
        "data.template_idle",
        "A template goes with conversations.",
        "data.sft_data names them.",
        ("data.chat_template",),
        "data.sft_data",
        lambda spec: spec.data.sft_data is not None,
        "there are no conversations (data.sft_data is null)",
    )
)
register_inert(
    InertSetting(
        "data.documents_idle",
        "Documents are told apart in text.",
        "Conversations never see each other, and only their answers have a loss.",
        ("data.reset_position_ids", "data.reset_attention_mask", "data.eod_mask_loss", "data.fim_rate"),
        "data.sft_data",
        lambda spec: spec.data.sft_data is None,
        "the data are conversations (data.sft_data), which are always kept apart",
    )
)
register_inert(
    InertSetting(
        "data.fim_idle",
        "fim_spm_rate and fim_tokens go with fill-in-the-middle.",
        "data.fim_rate turns it on.",
        ("data.fim_spm_rate", "data.fim_tokens"),
        "data.fim_rate",
        lambda spec: spec.data.fim_rate > 0,
        "there is no fill-in-the-middle (data.fim_rate is 0)",
    )
)


@rule("data.fim_mock", "What is filled in is text.")
def fim_mock(at: RuleContext) -> Iterator[Violation]:
    """Made-up tokens have no characters to cut between."""
    if at.spec.data.fim_rate > 0 and at.spec.data.mock:
        yield Violation(
            "data.fim_rate",
            "fill-in-the-middle cuts text, and the tokens are made up (data.mock)",
            {"fim_rate": at.spec.data.fim_rate},
            ({"data.fim_rate": 0.0},),
        )


@rule("data.fim_tokenizer", "The tokenizer has the marks of fill-in-the-middle.")
def fim_tokenizer(at: RuleContext) -> Iterator[Violation]:
    """One that is trained on the corpus has only an end of document."""
    data = at.spec.data
    if data.fim_rate > 0 and data.corpus is not None and at.spec.tokenizer.path is None:
        yield Violation(
            "data.fim_rate",
            "a tokenizer trained on the corpus has no tokens for prefix, middle and suffix: give tokenizer.path",
            {"fim_rate": data.fim_rate},
            ({"data.fim_rate": 0.0},),
        )


@rule("data.fim_marks", "Fill-in-the-middle has three marks, all different.")
def fim_marks(at: RuleContext) -> Iterator[Violation]:
    """Before the prefix, the middle and the suffix."""
    data = at.spec.data
    if data.fim_rate > 0 and data.fim_tokens and (len(data.fim_tokens) != 3 or len(set(data.fim_tokens)) != 3):
        yield Violation(
            "data.fim_tokens",
            f"fim_tokens needs three different tokens, and has {len(set(data.fim_tokens))}",
            {"fim_tokens": list(data.fim_tokens)},
            ({"data.fim_tokens": ()},),
        )


@rule("data.documents_end", "Documents are told apart by the token at their end.")
def documents_end(at: RuleContext) -> Iterator[Violation]:
    """Without data.append_eod nothing says where one ends."""
    data = at.spec.data
    if data.append_eod or data.corpus is None:
        return
    for key in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if getattr(data, key):
            fixes: tuple[Fix, ...] = ({"data.append_eod": True}, {f"data.{key}": False})
            yield Violation(f"data.{key}", f"{key} needs data.append_eod: nothing ends a document", fixes=fixes)


@rule("data.positions_apart", "Positions start again where attention does not look back.")
def positions_apart(at: RuleContext) -> Iterator[Violation]:
    """A document that still sees the one before it, at positions that it takes for its own, is confused by it."""
    data = at.spec.data
    if data.reset_position_ids and not data.reset_attention_mask and data.sft_data is None:
        yield Violation(
            "data.reset_position_ids",
            "positions start again with each document, and attention still crosses: tokens of two documents share "
            "a position",
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
