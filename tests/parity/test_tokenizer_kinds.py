"""Converted tokenizers held to the libraries that their files come from, on text of many scripts."""

import base64
import json
from pathlib import Path

import pytest
from token_files import sentences, small_tokenizer

from megalaunch.data.errors import DataError
from megalaunch.data.tokenizer import conversion
from megalaunch.data.tokenizer.tiktoken_list import TiktokenOptions
from megalaunch.data.tokenizer.tokenizer import load_tokenizer

TEXTS = [
    *sentences(30),
    "",
    " ",
    "  two  spaces and a tail  ",
    "tab\tand\nline\r\n\n end",
    "It's we'll THEY'VE 12345 3.14 x=1;y",
    "na\u00efve \u4e2d\u6587 \ud55c\uad6d\uc5b4 \u0627\u0644\u0639\u0631\u0628\u064a\u0629 \U0001f600\u200d\U0001f525",
    "</s> <s> <unk> <|endoftext|> \u2581 already",
    "\ufb01ne \u2460 \u00bd \uff21\uff22",
]


def lines() -> list[str]:
    return [
        *sentences(400),
        "the gull's 12 ships, 345 waves; and na\u00efve caf\u00e9s!",
        "x = y + 1\n\n  return z",
    ] * 3


@pytest.fixture(scope="module", params=["bpe", "bpe without bytes", "unigram", "unigram with bytes", "squeezing"])
def sentencepiece_model(request, tmp_path_factory) -> Path:
    library = pytest.importorskip("sentencepiece", reason="sentencepiece (the extra `parity`) is not installed")
    folder = tmp_path_factory.mktemp("model")
    squeezing = request.param == "squeezing"
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(lines()),
        model_prefix=str(folder / "tokenizer"),
        model_type="unigram" if "unigram" in request.param else "bpe",
        vocab_size=330 if request.param in ("bpe", "unigram with bytes") else 90,
        byte_fallback=request.param in ("bpe", "unigram with bytes"),
        normalization_rule_name="nmt_nfkc" if squeezing else "identity",
        remove_extra_whitespaces=squeezing,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


def test_sentencepiece_models(sentencepiece_model):
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    ours = load_tokenizer(sentencepiece_model)
    assert ours.vocab_size == theirs.vocab_size()
    assert ours.eod_id == theirs.eos_id()
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
    assert load_tokenizer(sentencepiece_model.parent).encode(TEXTS[0]) == theirs.encode(TEXTS[0])


def test_sentencepiece_with_defined_symbols(tmp_path):
    library = pytest.importorskip("sentencepiece", reason="sentencepiece (the extra `parity`) is not installed")
    same = {"vocab_size": 90, "model_type": "bpe", "user_defined_symbols": ["<mask>"], "hard_vocab_limit": False}
    rules = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "minloglevel": 2}
    for prefix in (False, True):
        library.SentencePieceTrainer.train(
            sentence_iterator=iter(lines()),
            model_prefix=str(tmp_path / str(prefix)),
            add_dummy_prefix=prefix,
            **same,
            **rules,
        )
    texts = [
        *TEXTS,
        "a <mask> sea",
        "<mask><mask>",
        "<mask> first",
        " <mask>",
        "<mask> ",
        "sea<mask>sea <mask",
        "<mask>\n",
    ]
    for prefix in (False, True):
        theirs = library.SentencePieceProcessor(model_file=str(tmp_path / f"{prefix}.model"))
        ours = load_tokenizer(tmp_path / f"{prefix}.model")
        for text in texts:
            assert ours.encode(text) == theirs.encode(text), text
    # All that is different: where a space is put before texts, one that is nothing but a symbol gets none.
    assert ours.encode("<mask>") == theirs.encode("<mask>")[1:]


def ranks_of(path: Path) -> dict[bytes, int]:
    """The tokens of a trained byte-level BPE in its order, the bytes first, as tiktoken has them."""
    vocabulary = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
    byte_of = {name: value for value, name in enumerate(conversion._byte_names())}
    learned = [bytes(byte_of[c] for c in token) for token in vocabulary if token != "<|endoftext|>"]
    return {
        token: rank
        for rank, token in enumerate([t for t in learned if len(t) == 1] + [t for t in learned if len(t) > 1])
    }


@pytest.mark.parametrize("count", [50_256, 100_256, 199_998, 151_643])
def test_tiktoken_ranks(tmp_path, monkeypatch, count):
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken (the extra `parity`) is not installed")
    ranks = ranks_of(small_tokenizer(tmp_path / "t.json", 400))
    pattern = conversion._TIKTOKEN[count][0]
    monkeypatch.setitem(conversion._TIKTOKEN, len(ranks), (pattern, {"<|endoftext|>": len(ranks) + 1}))
    path = tmp_path / "some.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    theirs = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    ours = load_tokenizer(path)
    assert (ours.vocab_size, ours.eod_id) == (len(ranks) + 2, len(ranks) + 1)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode_ordinary(text), text
        assert ours.decode(ours.encode(text)) == text


def test_tekken(tmp_path):
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken (the extra `parity`) is not installed")
    ranks = ranks_of(small_tokenizer(tmp_path / "t.json", 400))
    pattern = conversion._O200K
    kept = dict(list(ranks.items())[:300])
    vocabulary = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for token, rank in ranks.items()]
    config = {"pattern": pattern, "default_vocab_size": 1300, "default_num_special_tokens": 1000}
    (tmp_path / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocabulary}))
    theirs = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=kept, special_tokens={})
    ours = load_tokenizer(tmp_path / "tekken.json")
    assert (ours.vocab_size, ours.eod_id) == (1300, 2)
    for text in TEXTS:
        assert ours.encode(text) == [1000 + rank for rank in theirs.encode_ordinary(text)], text


def test_gpt2_vocabulary_and_merges(tmp_path):
    path = small_tokenizer(tmp_path / "tokenizer.json", 400)
    parsed = json.loads(path.read_text(encoding="utf-8"))["model"]
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "vocab.json").write_text(json.dumps(parsed["vocab"]))
    merges = "\n".join(pair if isinstance(pair, str) else " ".join(pair) for pair in parsed["merges"])
    (tmp_path / "gpt2" / "merges.txt").write_text("#version: 0.2\n" + merges + "\n", encoding="utf-8")
    theirs = load_tokenizer(path)
    for ours in (
        load_tokenizer(tmp_path / "gpt2"),
        load_tokenizer(tmp_path / "gpt2/vocab.json", tmp_path / "gpt2/merges.txt"),
    ):
        assert ours.vocabulary_hash() == theirs.vocabulary_hash()
        for text in TEXTS:
            if "<|endoftext|>" not in text:  # added tokens are found in text by tokenizer.json alone
                assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_megatrons_list_of_tiktoken_ranks(tmp_path, pattern):
    """Held to Megatron's own class, which finds special tokens in texts."""
    pytest.importorskip("tiktoken", reason="tiktoken (the extra `parity`) is not installed")
    module = pytest.importorskip("megatron.core.tokenizers.text.libraries.tiktoken_tokenizer")
    ranks = ranks_of(small_tokenizer(tmp_path / "t.json", 400))
    singles = [bytes([value]) for value in range(256)]
    tokens = [*singles, *(token for token in ranks if len(token) > 1)]
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("utf-8", "replace")}
        for rank, token in enumerate(tokens)
    ]
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps(entries))
    size = 50 + len(tokens) - 20  # the last ones are cut off
    theirs = module.TikTokenTokenizer(str(path), num_special_tokens=50, pattern=pattern, vocab_size=size)
    ours = load_tokenizer(path, tiktoken=TiktokenOptions(pattern, size, 50))
    assert (ours.vocab_size, ours.eod_id) == (theirs.vocab_size, theirs.eod)
    more = [
        "a <SPECIAL_9> b<s></s>",
        "!word ?Word ...x",
        "x\r\ny\n\n\nz",
        "12345",
        "a/b/\n",
        "HTTPServer McDonald's",
        "\n \n  x",
    ]
    for text in [*TEXTS, *more]:
        assert ours.encode(text) == theirs.text_to_ids(text), text
    with pytest.raises(
        DataError, match=rf"a vocabulary of 131,072 needs 130,072. Give --vocab-size {len(tokens) + 1000}"
    ):
        load_tokenizer(path)
    path.write_text(json.dumps([{"text": "x"}] * 300))
    with pytest.raises(DataError, match="line 1: not a token and its rank"):
        load_tokenizer(path, tiktoken=TiktokenOptions("v2", 300, 50))
