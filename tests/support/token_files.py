"""Small token files, tokenizers and corpora for the tests of the data wing."""

import json
from pathlib import Path

from megalaunch.data.indexed_dataset.builder import TokenWriter, token_type
from megalaunch.data.tokenizer.tokenizer import train_tokenizer
from megalaunch.schema import RunSpec, build_run_spec

TEXT = "the old sea captain walked slowly along a quiet shore while gulls cried over grey waves"
WORDS = TEXT.split()


def write_tokens(prefix: Path, documents: list[list[int]], vocab_size: int = 4096) -> Path:
    """One sequence a document, none for an empty one."""
    with TokenWriter(prefix, token_type(vocab_size)) as writer:
        for tokens in documents:
            if tokens:
                writer.add_sequence(tokens)
            writer.end_document()
    return prefix


def sentences(count: int) -> list[str]:
    """Different texts, the same on every call."""
    return [" ".join(WORDS[(7 * k * (k + 1) + j * j) % len(WORDS)] for j in range(5 + k % 9)) for k in range(count)]


def small_tokenizer(path: Path, vocab_size: int = 300) -> Path:
    """A tokenizer.json trained on `sentences`."""
    train_tokenizer(sentences(200), vocab_size, path)
    return path


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def prepared_spec(
    sequence_length: int = 3, vocab_size: int = 4000, seed: int = 1, tokenizer: Path | None = None, **data: object
) -> RunSpec:
    """The spec of a run on prepared data, with 50 samples asked for unless `num_samples` says otherwise."""
    shape = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 1}
    return build_run_spec(
        {
            "model": {**shape, "vocab_size": vocab_size},
            "data": {"num_samples": 50, **data},
            "tokenizer": {"path": None if tokenizer is None else str(tokenizer)},
            "batch": {"sequence_length": sequence_length, "global_batch_size": 1},
            "train": {"steps": 1, "seed": seed},
        }
    )


def write_letters(path: Path, count: int) -> None:
    """A tokenizer of `count` single characters, the first of which ends a document."""
    import tokenizers

    vocabulary = {chr(ord("0") + number): number for number in range(1, count)} | {"</s>": 0}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="1"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    inner.add_special_tokens(["</s>"])
    path.parent.mkdir(parents=True, exist_ok=True)
    inner.save(str(path))


def with_special_tokens(path: Path, before: str = "", after: str = "") -> Path:
    """Give a tokenizer.json the tokens of `before` and `after` (one each), and a post-processor that puts them."""
    import tokenizers

    inner = tokenizers.Tokenizer.from_file(str(path))
    names = [name for name in (before, after) if name]
    inner.add_special_tokens(names)
    ids = [(name, inner.token_to_id(name)) for name in names]
    template = tokenizers.processors.TemplateProcessing(single=f"{before} $A {after}".strip(), special_tokens=ids)
    # As Llama 3's: what deals with offsets comes first.
    inner.post_processor = tokenizers.processors.Sequence([tokenizers.processors.ByteLevel(), template])
    inner.save(str(path))
    return path
