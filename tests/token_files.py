"""Small token files, tokenizers and corpora for the tests of the data wing."""

import json
from pathlib import Path

from megalaunch.data.token_writer import TokenWriter, token_type
from megalaunch.data.tokenizer import train_tokenizer

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
