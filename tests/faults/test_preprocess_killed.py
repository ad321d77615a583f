"""Preprocessing killed at any moment leaves no half-written file, and --resume gives the bytes of one pass."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slow_cases import slow_but
from token_files import sentences, small_tokenizer

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess import state
from megalaunch.data.preprocess.preprocess import preprocess
from megalaunch.data.preprocess.settings import OnBadRecord, Settings

pytestmark = pytest.mark.timed

RUN = """
import sys
from pathlib import Path
from megalaunch.data.preprocess.preprocess import preprocess
from megalaunch.data.preprocess.settings import OnBadRecord, Settings
settings = Settings(Path(sys.argv[2]), workers=int(sys.argv[4]), append_eod=True, on_bad_record=OnBadRecord.QUARANTINE,
                    resume=True, chunk_bytes=20_000, checkpoint_seconds=0.0)
preprocess([sys.argv[1]], Path(sys.argv[3]), settings, lambda p: print(p.documents, flush=True))
"""
OUTPUTS = ("out_text_document.bin", "out_text_document.idx", "out_quarantine.jsonl")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> tuple[Path, Path]:
    """A jsonl file with bad lines strewn in, and a tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": " ".join(sentences(30)[number % 30 :])}) for number in range(3000)]
    for number in range(10, 3000, 97):
        lines[number] = '{"text": ' + str(number) + "}"
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "in.jsonl", small_tokenizer(folder / "tokenizer.json")


def settings_for(tokenizer: Path, **changes: object) -> Settings:
    same = {"append_eod": True, "on_bad_record": OnBadRecord.QUARANTINE, "chunk_bytes": 20_000}
    return Settings(tokenizer, **{**same, "checkpoint_seconds": 0.0, **changes})


def content(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in OUTPUTS]


def counts(folder: Path) -> dict[str, int]:
    return json.loads((folder / "out_text_document.json").read_text())["counts"]


@pytest.fixture(scope="module")
def one_pass(corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    preprocess([str(corpus[0])], folder / "out", settings_for(corpus[1]), lambda progress: None)
    return folder


@pytest.mark.parametrize("workers", slow_but([1, 2], 2))
def test_killed_again_and_again(corpus, one_pass, tmp_path, workers):
    command = [sys.executable, "-c", RUN, *map(str, (*corpus, tmp_path / "out", workers))]
    draw, killed = random.Random(workers), 0
    for _ in range(4):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(draw.randrange(1, 12)):
            if not process.stdout.readline():
                break
        time.sleep(draw.random() * 0.01)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        process.stdout.close()
        for name in OUTPUTS[:2]:  # whole under its final name, or not there
            final = tmp_path / name
            assert not final.exists() or final.read_bytes() == (one_pass / name).read_bytes()
    assert killed >= 2
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    # What was finished before is not done again.
    assert int(done.stdout.split()[0]) > 200 or not done.stdout
    assert content(tmp_path) == content(one_pass)
    for name in ("documents", "written", "quarantined", "skipped", "tokens", "bytes_read"):
        assert counts(tmp_path)[name] == counts(one_pass)[name]
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("step", slow_but(["assemble", "rename", "second rename"], "second rename"))
def test_an_end_while_the_final_names_are_given(corpus, one_pass, tmp_path, monkeypatch, step):
    calls = 0
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        nonlocal calls
        if self.parent.name == ".out.preprocess" and self.suffix in (".bin", ".idx"):
            calls += 1
            if calls == {"rename": 1, "second rename": 2}.get(step):
                raise OSError(28, "No space left on device")
        return real(self, target)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        if step == "assemble":
            patch.setattr(state, "copy_index", full)
        with pytest.raises(DataError, match=r"No space left on device\. Free space there, then continue with --resume"):
            preprocess([str(corpus[0])], tmp_path / "out", settings_for(corpus[1]), lambda progress: None)
    assert not (tmp_path / "out_text_document.idx").exists()
    resumed: list[int] = []
    settings = settings_for(corpus[1], resume=True)
    preprocess([str(corpus[0])], tmp_path / "out", settings, lambda progress: resumed.append(progress.documents))
    assert resumed == []  # nothing was encoded again
    assert content(tmp_path) == content(one_pass)


def test_a_full_disk_while_writing(corpus, one_pass, tmp_path, monkeypatch):
    real, left = os.write, 400_000

    def write(file: int, data: memoryview) -> int:
        nonlocal left
        left -= len(data)
        if left < 0:
            raise OSError(28, "No space left on device")
        return real(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(state.os, "write", write)
        with pytest.raises(DataError, match="cannot write it: No space left on device"):
            preprocess([str(corpus[0])], tmp_path / "out", settings_for(corpus[1]), lambda progress: None)
    assert not list(tmp_path.glob("out*"))
    settings = settings_for(corpus[1], resume=True)
    preprocess([str(corpus[0])], tmp_path / "out", settings, lambda progress: None)
    assert content(tmp_path) == content(one_pass)


def test_a_bad_record_stops_and_the_rest_is_done_later(corpus, one_pass, tmp_path):
    settings = settings_for(corpus[1], on_bad_record=OnBadRecord.STOP, chunk_bytes=2000)
    with pytest.raises(DataError, match=r"in\.jsonl, line 11: "):
        preprocess([str(corpus[0])], tmp_path / "out", settings, lambda progress: None)
    settings = settings_for(corpus[1], resume=True)
    preprocess([str(corpus[0])], tmp_path / "out", settings, lambda progress: None)
    assert content(tmp_path) == content(one_pass)


def test_resume_refuses_what_would_give_other_bytes(corpus, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(corpus[0].read_bytes())
    stopping = settings_for(corpus[1], on_bad_record=OnBadRecord.STOP, chunk_bytes=500)
    notes: list[str] = []

    def note(text: str) -> None:
        if "brings it" not in text:  # of a package that would be faster, where it is not installed
            notes.append(text)

    def again(**changes: object) -> None:
        settings = settings_for(corpus[1], **changes)
        preprocess([str(path)], tmp_path / "out", settings, lambda progress: None, note)

    with pytest.raises(DataError):
        preprocess([str(path)], tmp_path / "out", stopping, lambda progress: None)
    with pytest.raises(DataError, match=r"the unfinished run had other settings\. Give the same again, or leave out"):
        again(resume=True, append_eod=False)
    os.utime(path, (1, 1))
    with pytest.raises(DataError, match="the unfinished run had other inputs"):
        again(resume=True)
    again()
    assert notes == ["starting from the beginning; --resume would continue the unfinished run"]
    notes.clear()
    again(resume=True)
    assert notes == ["there is nothing to resume; starting from the beginning"]


def test_two_at_once_are_refused(corpus, tmp_path):
    def show(_: object) -> None:
        with pytest.raises(DataError, match="another process is writing these files"):
            preprocess([str(corpus[0])], tmp_path / "out", settings_for(corpus[1]), lambda progress: None)

    preprocess([str(corpus[0])], tmp_path / "out", settings_for(corpus[1], chunk_bytes=1 << 20), show)
    assert (tmp_path / "out_text_document.idx").exists()
