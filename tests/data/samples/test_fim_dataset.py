"""Fill-in-the-middle loses no special token and adds no space, whatever the tokenizer's kind."""

import json
from pathlib import Path

import pytest
import tokenizers
from token_files import sentences, small_tokenizer, write_tokens
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from megalaunch.data.samples.fim_dataset import FIMDataset, FIMTokens, find_fim_tokens
from megalaunch.data.samples.gpt_dataset import GPTDataset
from megalaunch.data.tokenizer.prefix_space import without_prefix_space
from megalaunch.data.tokenizer.tokenizer import Tokenizer, load_tokenizer

SPACE = "\u2581"
SPECIAL = ["<unk>", "</s>", "<s>", "<|tool|>", "<PRE>", "<MID>", "<SUF>"]
LENGTH = 120


def byte_level(folder: Path) -> Path:
    path = small_tokenizer(folder / "tokenizer.json")
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.add_special_tokens(SPECIAL)
    inner.save(str(path))
    return path


def trained(folder: Path, inner: tokenizers.Tokenizer) -> Path:
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, show_progress=False)
    if isinstance(inner.model, models.Unigram):
        trainer = trainers.UnigramTrainer(
            vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
        )
    inner.train_from_iterator(sentences(200), trainer)
    inner.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def llama(folder: Path) -> Path:
    """As in Llama 2's tokenizer.json."""
    inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    inner.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return trained(folder, inner)


def metaspace(folder: Path) -> Path:
    inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    inner.decoder = decoders.Metaspace(prepend_scheme="always")
    return trained(folder, inner)


def unigram(folder: Path) -> Path:
    inner = tokenizers.Tokenizer(models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    return trained(folder, inner)


def sentencepiece(folder: Path) -> Path:
    library = pytest.importorskip("sentencepiece", reason="sentencepiece (the extra `parity`) is not installed")
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences(400)),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=120,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<|tool|>", "<PRE>", "<MID>", "<SUF>"],
        minloglevel=2,
    )
    return folder / "tokenizer.model"


@pytest.fixture(params=[byte_level, llama, metaspace, unigram, sentencepiece])
def tokenizer(request, tmp_path) -> Tokenizer:
    return load_tokenizer(request.param(tmp_path))


def filled(tmp_path: Path, tokenizer: Tokenizer, documents: list[list[int]], spm_rate: float) -> tuple:
    end = tokenizer.token_id("</s>")
    prefix = write_tokens(tmp_path / f"tokens{spm_rate}", [[*document, end] for document in documents])
    samples = GPTDataset(prefix, LENGTH, 60, 1)
    marks = find_fim_tokens(tokenizer, ("<PRE>", "<MID>", "<SUF>"), end, tmp_path)
    assert len({marks.prefix, marks.middle, marks.suffix, end}) == 4
    return samples, FIMDataset(samples, tokenizer, marks, 1.0, spm_rate, seed=1), marks


def put_back(found: list[int], marks: FIMTokens, spm: bool) -> list[int]:
    middle, suffix = found.index(marks.middle), found.index(marks.suffix)
    if spm:  # suffix, then prefix and middle without a mark between them
        return [*found[middle + 1 :], *found[2:middle]]
    return [*found[1:suffix], *found[middle + 1 :], *found[suffix + 1 : middle]]


def plain(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The very text, by the pieces as they are written."""
    return without_prefix_space(tokenizer).decode(ids, special=True)


@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_fim_keeps_text_and_special_tokens(tmp_path, tokenizer, spm_rate):
    start, tool = tokenizer.token_id("<s>"), tokenizer.token_id("<|tool|>")
    documents = []
    for number, text in enumerate(sentences(200)):
        first, second = tokenizer.encode(text), tokenizer.encode("  " + text[:9])
        documents.append([start, *first, tool, tool, *second] if number % 2 else [*first, tool])
    samples, reordered, marks = filled(tmp_path, tokenizer, documents, spm_rate)
    held = 0
    for index in range(60):
        before, after = samples[index].tolist(), reordered[index].tolist()
        document = before[: before.index(marks.eod)]
        found = after[: after.index(marks.eod)] if marks.eod in after else []
        if not document or not found or marks.middle not in found:
            continue
        assert plain(tokenizer, put_back(found, marks, bool(spm_rate))) == plain(tokenizer, document)
        special = [number for number in found if number in (start, tool)]
        assert sorted(special) == sorted(number for number in document if number in (start, tool))
        held += bool(special)
    assert held > 20


def test_parts_of_a_text_are_the_text(tokenizer):
    same = without_prefix_space(tokenizer)
    assert without_prefix_space(same).to_json() == same.to_json()
    text = "the old sea captain walked slowly"
    for cut in range(len(text) + 1):
        assert same.decode([*same.encode(text[:cut]), *same.encode(text[cut:])]) == text
    assert len(same.encode("")) == 0


def test_a_text_that_a_tokenizer_does_not_give_back_stays(tmp_path):
    """One that lowers letters would change what is rearranged."""
    path = byte_level(tmp_path)
    content = json.loads(path.read_text(encoding="utf-8"))
    ids = load_tokenizer(path).encode("THESEASHORE")
    content["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(content), encoding="utf-8")
    samples, reordered, _ = filled(tmp_path, load_tokenizer(path), [ids] * 40, 0.5)
    assert [reordered[index].tolist() for index in range(20)] == [samples[index].tolist() for index in range(20)]


def test_an_unknown_character_stays_one_token(tmp_path):
    tokenizer = load_tokenizer(llama(tmp_path))
    ids = tokenizer.encode("the \u4e2d sea")
    assert tokenizer.token_id("<unk>") in ids
    _, reordered, marks = filled(tmp_path, tokenizer, [ids] * 40, 0.0)
    for index in range(20):
        after = reordered[index].tolist()
        found = after[: after.index(marks.eod)]
        assert found.count(tokenizer.token_id("<unk>")) == 1
