"""SentencePiece models that are hard to convert, held to the library on made-up strings; or refused by name."""

import random
import unicodedata
from pathlib import Path

import pytest
from slow_cases import slow_but
from token_files import sentences

from megalaunch.data.errors import DataError
from megalaunch.data.tokenizer.character_map import read_replacements
from megalaunch.data.tokenizer.sentencepiece_file import read_sentencepiece
from megalaunch.data.tokenizer.tokenizer import load_tokenizer

library = pytest.importorskip("sentencepiece", reason="sentencepiece (the extra `parity`) is not installed")

SPACES = ["\u2581" * count for count in range(2, 9)]
LINE_ENDS = ["\n" * count for count in range(1, 4)]
AS_IS = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
BYTES = {"byte_fallback": True, "vocab_size": 420}
PARTS = [
    *("    ", "  ", " ", "\t", "\n", "\n\n", "\r", "\r\n", "def f(x):", "return x", "the sea", "<mask>", "A", ">", "q"),
    *("<0x0A>", "<0x", "0A>", "<0xAB><0xaB>", "\u00bd", "\uff21\uff22", "\ufb01", "caf\u00e9", "cafe\u0301", "\u2581"),
    *("\u4e2d\u6587", "\U0001f600\u200d\U0001f525", "\u2460", "\u00a0", "\u3000", "\u200b", "\u212b", "\u1e9b\u0323"),
    *("\u00ad", "\x07", "\u0635\u0644", "\ufdfa", "\uff76\uff9e", "\uff9e", "\u1100\u1161", "\u3072\u3099", "\u0130"),
    *("\u0651\u064e", "\u05d1\u05bc\u05b8", "e\u0323\u0302", "a\u0300\u0323", "\u0915\u093c", "\u0340"),
]


def texts() -> list[str]:
    drawn = random.Random(3)
    made = ["".join(drawn.choice(PARTS) for _ in range(drawn.randrange(1, 9))) for _ in range(1000)]
    ranges = [(0x20, 0x7F), (0xA0, 0x250), (0x370, 0x500), (0x3040, 0x3100), (0xAC00, 0xAC80), (0x900, 0x980)]
    for _ in range(300):
        scripts = [drawn.choice(ranges) for _ in range(3)]
        words = ["".join(chr(drawn.randrange(*script)) for _ in range(4)) for script in scripts]
        made += [unicodedata.normalize(form, " ".join(words)) for form in ("NFC", "NFD")]
    return [text for text in made if text.strip() != "<mask>"]  # which has no space put before it: see docs/data.md


def stacked_marks() -> list[str]:
    """Letters with several combining marks in any order, jamo, and characters of all planes that have names."""
    drawn = random.Random(4)
    named = [chr(point) for point in range(0x20, 0x20000) if unicodedata.category(chr(point))[0] not in "C"]
    letters = [point for point in named if unicodedata.decomposition(point)]
    marks = [point for point in named if unicodedata.combining(point)]
    jamo = [chr(point) for point in (*range(0x1100, 0x1200), *range(0x3131, 0x318F), *range(0xFFA0, 0xFFDD))]
    made = [
        "".join(drawn.choice(letters) + "".join(drawn.choices(marks[:80], k=drawn.randrange(5))) for _ in range(2))
        for _ in range(3000)
    ]
    made += ["".join(drawn.choices([*marks, "\u200d", "\n"], k=4)) + drawn.choice(letters) for _ in range(500)]
    made += ["".join(drawn.choices(jamo, k=8)) for _ in range(1000)]
    return made + ["".join(drawn.choices(named, k=8)) for _ in range(1000)]


def trained(folder: Path, **options: object) -> Path:
    code = ["def f(x):\n    if x:\n        return  x + 1\n\n\nclass A:\n\tpass  \n"] * 20
    lines = [*sentences(400), "na\u00efve caf\u00e9s, 12 ships;", "x = y + 1\n\n  return z"] * 3
    given = {"vocab_size": 130, "hard_vocab_limit": False, "minloglevel": 2, **options}
    library.SentencePieceTrainer.train(
        sentence_iterator=iter([*lines, *code]), model_prefix=str(folder / "tokenizer"), **given
    )
    return folder / "tokenizer.model"


OPTIONS = [
    {**AS_IS, **BYTES},
    {**AS_IS, **BYTES, "add_dummy_prefix": False},
    {"normalization_rule_name": "nmt_nfkc", **BYTES},
    {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": False, **BYTES},
    {"normalization_rule_name": "nfkc"},
    {"normalization_rule_name": "nmt_nfkc_cf", "user_defined_symbols": ["<mask>"]},
]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize(
    "options",
    slow_but(OPTIONS, OPTIONS[0], OPTIONS[2]),
)
def test_ids_are_the_librarys(tmp_path, kind, options):
    path = trained(tmp_path, model_type=kind, **options)
    theirs, ours = library.SentencePieceProcessor(model_file=str(path)), load_tokenizer(path)
    wrong = [ascii(text) for text in [*texts(), *stacked_marks()] if ours.encode(text) != theirs.encode(text)]
    assert wrong == []


# A quarter of a million each.
@pytest.mark.parametrize("name", slow_but(["nmt_nfkc", "nfkc_cf"], every=["nmt_nfkc"]))
def test_every_replacement_of_a_character_map_is_the_librarys(tmp_path, name):
    path = trained(tmp_path, model_type="bpe", normalization_rule_name=name, **BYTES)
    theirs, ours = library.SentencePieceProcessor(model_file=str(path)), load_tokenizer(path)
    keys = read_replacements(read_sentencepiece(path.read_bytes()).character_map)
    assert len(keys) > 200_000
    text = " q ".join(keys)
    assert ours.encode(text) == theirs.encode(text)


def rules(folder: Path, count: int) -> dict[str, object]:
    """Return the options for a map of our own: `count` pairs of letters become capitals, and some more."""
    pairs = [f"{ord('p'):x} {ord('a') + number:x}\t{ord('A') + number:x}" for number in range(count)]
    longer = [f"73 65 61\t{ord('O'):x} {ord('K'):x}", f"73 65\t{ord('W'):x}", "68 65\t", "7a\t301"]
    (folder / "rules.tsv").write_text("\n".join([*pairs, *longer]) + "\n")
    return {"normalization_rule_tsv": str(folder / "rules.tsv"), "model_type": "bpe", **BYTES}


def test_a_character_map_of_ones_own(tmp_path):
    path = trained(tmp_path, **rules(tmp_path, 20))
    theirs, ours = library.SentencePieceProcessor(model_file=str(path)), load_tokenizer(path)
    drawn = random.Random(5)
    for text in ["".join(drawn.choices("seahp bqz", k=12)) for _ in range(2000)]:
        assert ours.encode(text) == theirs.encode(text), text


def test_a_character_map_that_is_damaged_is_refused(tmp_path):
    path = trained(tmp_path, **rules(tmp_path, 2))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"OK\0", b"\xff\xff\0"))
    with pytest.raises(DataError, match=r"its character map is damaged.*Give its tokenizer.json instead"):
        load_tokenizer(path)


@pytest.mark.parametrize("fallback", [{}, BYTES])
def test_runs_of_spaces_as_symbols(tmp_path, fallback):
    """Gemma's: indented code is a few tokens of nothing but spaces."""
    symbols = [*SPACES, *LINE_ENDS, "<mask>"]
    path = trained(
        tmp_path, model_type="bpe", add_dummy_prefix=False, user_defined_symbols=symbols, **AS_IS, **fallback
    )
    theirs, ours = library.SentencePieceProcessor(model_file=str(path)), load_tokenizer(path)
    indented = ["        return x\n\n\n", "\t  x", "  " * 9 + "y", " \u2581 ", "a  <mask>   b", *texts()]
    wrong = [ascii(text) for text in indented if ours.encode(text) != theirs.encode(text)]
    assert wrong == []
    assert [ours.token(number) for number in ours.encode("        x")] == ["\u2581" * 8, "x"]
    assert ours.decode(ours.encode("        return  x")) == "        return  x"


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"user_defined_symbols": SPACES, **AS_IS}, "its treatment of spaces"),
        ({"user_defined_symbols": SPACES, "add_dummy_prefix": False}, "its treatment of spaces"),
        (
            {"user_defined_symbols": LINE_ENDS, "model_type": "unigram", "add_dummy_prefix": False, **AS_IS},
            "its user-defined symbols overlap",
        ),
        ({"model_type": "unigram", "user_defined_symbols": ["0x"], **AS_IS, **BYTES}, "texts with byte names"),
    ],
)
def test_what_cannot_be_kept_is_refused(tmp_path, options, cause):
    path = trained(tmp_path, **{"model_type": "bpe", **options})
    with pytest.raises(DataError, match=f"{cause}.*Give its tokenizer.json instead"):
        load_tokenizer(path)
