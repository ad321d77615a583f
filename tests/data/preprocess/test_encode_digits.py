"""Tokenizers that isolate digits first: gigatoken encodes with a rewritten copy, and gives the library's ids."""

import json
import random
import unicodedata

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from megalaunch.data.preprocess import gigatoken_encoder
from megalaunch.data.preprocess.encoder_backend import select_backend
from megalaunch.data.preprocess.gigatoken_encoder import DigitTokens, GigatokenEncoder, may_hold_newer_digits
from megalaunch.data.preprocess.settings import EngineChoice
from megalaunch.data.tokenizer.tokenizer import tokenizer_from_json

gigatoken = pytest.importorskip("gigatoken", reason="the extra `data` is not installed")

TEXT = "the old x1 sea 0123 456 78 \u00e9 \u00b2 \u0663\u0664 \u00bd caf <r_5> aaa   bb\n\n  cc's he'll"
MISSING = "\x04"


def in_smollm_style(*added: AddedToken, every_byte: bool = False, **digits: bool) -> str:
    """A tokenizer.json as SmolLM2's: without 9, and with tokens of the bytes in `TEXT` alone unless `every_byte`."""
    inner = Tokenizer(models.BPE())
    isolate = pre_tokenizers.Digits(**{"individual_digits": True, **digits})
    inner.pre_tokenizer = pre_tokenizers.Sequence([isolate, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet() if every_byte else []
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet)
    inner.train_from_iterator([TEXT] * 20, trainer)
    inner = Tokenizer.from_str(merging_spaces(json.loads(inner.to_str())))
    for token in added:
        (inner.add_special_tokens if token.special else inner.add_tokens)([token])
    return inner.to_str()


def merging_spaces(whole: dict) -> str:
    """With merges of a space or a 0 and the byte after it: a digit that is not isolated gets other ids."""
    vocabulary = whole["model"]["vocab"]
    follow = [byte for byte in "0123456789" + "".join(map(chr, range(0xC2, 0xF5))) if byte in vocabulary]
    pairs = [(first, byte) for first in "\u01200" for byte in follow]
    vocabulary |= {first + byte: len(vocabulary) + at for at, (first, byte) in enumerate(pairs)}
    whole["model"]["merges"] = [[*pair] for pair in pairs] + whole["model"]["merges"]
    return json.dumps(whole)


def special(content: str, **flags: bool) -> AddedToken:
    return AddedToken(content, **{"special": True, "normalized": False, **flags})


ADDED = {
    "none": (),
    "digits within": (special("<r_5>"), special("<r_55>"), special("x1")),
    "digits first": (special("12"), special("1x"), special("123")),
    "a digit": (special("7"), special("\u00b2")),
    "strips spaces": (special("<l>", lstrip=True), special("5r", rstrip=True), special("4b", lstrip=True, rstrip=True)),
    "normalized": (AddedToken("the", normalized=True), AddedToken("  ", normalized=True)),
}


@pytest.mark.parametrize("every_byte", [True, False])
@pytest.mark.parametrize("added", ADDED.values(), ids=ADDED)
def test_ids_are_those_of_the_library(added, every_byte):
    content = in_smollm_style(*added, every_byte=every_byte)
    with pytest.raises(BaseException, match=r"\w"):  # by itself it takes none of them; its panics are no Exception
        gigatoken.Tokenizer.from_json(content.encode())
    encode = GigatokenEncoder(content)
    draw = random.Random(1)
    bits = [token.content for token in added] * 3 + list("0123456789 \n\tabcx<>r_\u00e9\u00b2\u0663\u00bd\u2167")
    bits += ["\u4e94", "  ", "the", "sea", "'s", " 1", "\u0967", "\U0001d7d8", "a\u0301", "\u3000"]
    texts = ["", MISSING, *("".join(draw.choices(bits, k=draw.randint(1, 14))) for _ in range(1500))]
    texts += [f"{text}{MISSING}{text}" for text in texts[:100]]
    for text, ids in zip(texts, tokenizer_from_json(content).encode_batch(texts), strict=True):
        assert encode(text).tolist() == ids, ascii(text)


def newer_digits() -> list[str]:
    """Numbers since Unicode 15, which older Pythons take for unassigned: Kaktovik, Nag Mundari, Garay, Gurung Khema."""
    return [chr(point) for first in (0x1D2C0, 0x1E4F0, 0x10D40, 0x16130) for point in range(first, first + 10)]


def test_every_digit_of_unicode_is_isolated():
    content = in_smollm_style(every_byte=True)
    encode = GigatokenEncoder(content)
    numbers = [chr(point) for point in range(0x20000) if unicodedata.category(chr(point))[0] == "N"]
    assert len(numbers) > 1700
    texts = [f"a{number}1 {number}b  {number}" for number in [*numbers, *newer_digits()]]
    for text, ids in zip(texts, tokenizer_from_json(content).encode_batch(texts), strict=True):
        assert encode(text).tolist() == ids, ascii(text)


def test_only_text_that_needs_it_is_left_to_the_library(monkeypatch):
    content = in_smollm_style()
    encode = GigatokenEncoder(content)
    asked = []
    monkeypatch.setattr(encode, "_exact_ids", lambda text: asked.append(text) or encode._encode(text))
    for text in ("sea 0123", "x\u00b2 \u0663\u0664 caf\u00e9"):
        encode(text)
    assert asked == []
    encode(f"sea{MISSING}")
    assert asked == [f"sea{MISSING}"]
    assert may_hold_newer_digits("sea \U0001fbff")  # unassigned in every Unicode so far
    assert not may_hold_newer_digits("sea \U0002a000 \U000f0000 \u0663")


def test_what_cannot_be_rewritten_is_not():
    assert DigitTokens.build(in_smollm_style()) is not None
    assert DigitTokens.build(in_smollm_style(special("sea", single_word=True))) is None
    assert DigitTokens.build(in_smollm_style(AddedToken("x1", normalized=True))) is None
    assert DigitTokens.build(in_smollm_style(individual_digits=False)) is None
    inner = Tokenizer.from_str(in_smollm_style())
    inner.normalizer = normalizers.NFKC()
    assert DigitTokens.build(inner.to_str()) is None
    whole = json.loads(in_smollm_style())
    whole["pre_tokenizer"]["pretokenizers"].reverse()
    assert DigitTokens.build(json.dumps(whole)) is None
    whole["pre_tokenizer"]["pretokenizers"].reverse()
    whole["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True
    assert DigitTokens.build(json.dumps(whole)) is None
    whole["pre_tokenizer"] = None
    whole["added_tokens"] = [{"content": "Digits"}]
    assert DigitTokens.build(json.dumps(whole)) is None


def test_it_is_chosen_once_its_ids_are_found_to_agree(monkeypatch):
    tokenizer = tokenizer_from_json(in_smollm_style(every_byte=True))
    chosen = select_backend(EngineChoice.AUTO, tokenizer, [TEXT])
    assert (chosen.name, chosen.note) == (EngineChoice.GIGATOKEN, "")
    monkeypatch.setattr(gigatoken_encoder, "_digits", lambda: list("0123456789"))
    chosen = select_backend(EngineChoice.AUTO, tokenizer, [])
    assert chosen.name is EngineChoice.TOKENIZERS
    assert "gigatoken gives other ids for" in chosen.note


def test_a_renewed_one_gives_the_same_ids(monkeypatch):
    monkeypatch.setattr(gigatoken_encoder, "_private_bytes", lambda: None)
    monkeypatch.setattr(gigatoken_encoder, "_CHECK_EVERY", 10)
    monkeypatch.setattr(gigatoken_encoder, "_RELOAD_EVERY", 10)
    encode = GigatokenEncoder(in_smollm_style())
    first, engine = encode(TEXT), encode._encode
    assert first.tolist() == encode(TEXT).tolist()
    assert encode._encode is not engine
