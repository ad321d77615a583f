"""gigatoken within bounds: its memory of words, and characters newer than those that `tokenizers` knows."""

import itertools
import unicodedata

import pytest
from gigatoken_growth import growth_in_new_process
from token_files import small_tokenizer

from megalaunch.data.preprocess import gigatoken_encoder
from megalaunch.data.preprocess.encoder_backend import make_encoder
from megalaunch.data.preprocess.gigatoken_encoder import GigatokenEncoder, has_newer_marks
from megalaunch.data.preprocess.settings import EngineChoice
from megalaunch.data.tokenizer.tokenizer import load_tokenizer, tokenizer_from_json

pytest.importorskip("gigatoken", reason="the extra `data` is not installed")


@pytest.fixture(scope="module")
def content(tmp_path_factory) -> str:
    return load_tokenizer(small_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")).to_json()


def test_memory_is_bounded_on_text_that_never_repeats(content):
    """In small: without renewal it grows by more than six times the limit."""
    limit = 12 << 20
    grown, reloads = growth_in_new_process(content, limit)
    assert reloads
    assert grown < 4 * limit, grown  # 29 to 33 MB on Linux, by the allocator
    grown, reloads = growth_in_new_process(content, 1 << 40)
    assert not reloads
    assert grown > 6 * limit, grown  # 101 MB


def test_it_is_renewed_by_length_where_a_process_cannot_be_measured(content, monkeypatch):
    monkeypatch.setattr(gigatoken_encoder, "_private_bytes", lambda: None)
    monkeypatch.setattr(gigatoken_encoder, "_CHECK_EVERY", 10)
    monkeypatch.setattr(gigatoken_encoder, "_RELOAD_EVERY", 25)
    encode = GigatokenEncoder(content)
    held = []
    for _ in range(6):
        encode("ten signs!")
        held.append(encode._encode)
    assert [a is b for a, b in itertools.pairwise(held)] == [True, False, True, True, False]


@pytest.fixture(scope="module")
def normalizing(content) -> str:
    """The same with the normalizer of Qwen's."""
    import tokenizers

    inner = tokenizers.Tokenizer.from_str(content)
    inner.normalizer = tokenizers.normalizers.NFC()
    return inner.to_str()


def in_a_text(point: int) -> str:
    """Between marks that it is sorted among."""
    return f"a\u0301{chr(point)}\u0323\u0301 {chr(point)}"


def test_newer_marks_are_encoded_as_tokenizers_does(normalizing):
    encode, theirs = make_encoder(EngineChoice.GIGATOKEN, normalizing), tokenizer_from_json(normalizing)
    points = [point for first, last in gigatoken_encoder._NEWER for point in range(first, last + 1)]
    # Dives Akuru, Todhri, Tulu-Tigalari, Gurung Khema, Kirat Rai: two that become one
    pairs = ["\U00011935\U00011930", "\U000105d2\u0307", "\U00011382\U000113c9", "\U0001611e\U0001611e"]
    texts = [*map(in_a_text, points), *pairs, "\U00016d67\U00016d67", "caf\u00e9 cafe\u0301"]
    for text, ids in zip(texts, theirs.encode_batch(texts), strict=True):
        assert encode(text).tolist() == ids, ascii(text)
    raw = encode._encode  # and it is needed: by itself it gives others
    others = [text for text, ids in zip(texts, theirs.encode_batch(texts), strict=True) if raw(text).tolist() != ids]
    assert len(others) > 100
    assert not has_newer_marks("na\u00efve \u4e2d\u6587 \U0001f600 cafe\u0301")


def test_no_other_mark_is_newer(normalizing):
    """Every mark that Python knows; where this fails after an upgrade, the table wants the ones named."""
    encode, theirs = make_encoder(EngineChoice.GIGATOKEN, normalizing), tokenizer_from_json(normalizing)
    marks = [point for point in range(0x300, 0x1F000) if unicodedata.category(chr(point)).startswith("M")]
    texts = [in_a_text(point) for point in marks]
    wrong = [
        hex(point)
        for point, text, ids in zip(marks, texts, theirs.encode_batch(texts), strict=True)
        if encode(text).tolist() != ids
    ]
    assert wrong == []


def test_without_a_normalizer_nothing_is_looked_for(content, monkeypatch):
    monkeypatch.setattr(gigatoken_encoder, "has_newer_marks", lambda text: pytest.fail("looked"))
    encode, theirs = make_encoder(EngineChoice.GIGATOKEN, content), tokenizer_from_json(content)
    assert encode(in_a_text(0x1E6EE)).tolist() == theirs.encode(in_a_text(0x1E6EE))
