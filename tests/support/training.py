"""Running `megalaunch train recipe=tiny` on a small corpus of made-up text, in a process of its own."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from warm_process import COLD_MEGALAUNCH, MEGALAUNCH

from megalaunch.process import descendants, kill_all

# A sitecustomize.py runs, and the client of the Hugging Face Hub reads its settings, once in a process.
_READ_AT_START = ("PYTHONPATH", "HF_")


def make_corpus(folder: Path, documents: int = 12) -> Path:
    """A few documents of words in some order, the same every time."""
    folder.mkdir(parents=True, exist_ok=True)
    source = random.Random(7)
    words = ("the", "a", "one", "of", "many", "small", "tests", "count", "words", "until", "they", "are", "done", "\n")
    for number in range(documents):
        text = " ".join(source.choice(words) for _ in range(400))
        (folder / f"document_{number:02d}.txt").write_text(text, encoding="utf-8")
    return folder


def tiny_overrides(folder: Path, *more: str, shared: Path | None = None) -> list[str]:
    """The overrides of a tiny run in folder/run, on a corpus that several tests may share."""
    shared = folder if shared is None else shared
    corpus = make_corpus(shared / "corpus")
    return [
        "recipe=tiny",
        f"data.corpus={corpus}",
        f"data.cache_directory={shared / 'cache'}",
        f"run.directory={folder / 'run'}",
        "platform=cpu",
        "precision=fp32",
        *more,
    ]


@contextmanager
def training(
    folder: Path, *more: str, shared: Path | None = None, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """`megalaunch train` on a tiny run; on leaving, nothing that it started is left, whatever the test found."""
    start = COLD_MEGALAUNCH if any(name.startswith(_READ_AT_START) for name in environment) else MEGALAUNCH
    process = subprocess.Popen(
        [*start, "train", *tiny_overrides(folder, *more, shared=shared)],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    failed = True
    try:
        yield process
        failed = False
    finally:
        left = descendants(process.pid)
        process.kill()
        said = process.communicate()
        kill_all(left, 5)
        if failed:
            print(*said, sep="")  # with the failure, which pytest shows


def train_tiny(folder: Path, *more: str, shared: Path | None = None, **environment: str) -> tuple[int, str, str]:
    """Train to the end: (exit code, stdout, stderr)."""
    with training(folder, *more, shared=shared, **environment) as process:
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err
