"""Token files: Megatron's bytes, every broken invariant named, and whole or not at all."""

import hashlib
import os
import resource
import signal
import struct
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import write_tokens

from megalaunch.data.errors import DataError
from megalaunch.data.indexed_dataset.builder import TokenWriter, token_type
from megalaunch.data.indexed_dataset.dataset import IndexedTokens

LENGTHS_AT, SEQUENCES = 34, 2  # of the golden file below
OFFSETS_AT = LENGTHS_AT + 4 * SEQUENCES
DOCUMENTS_AT = OFFSETS_AT + 8 * SEQUENCES


def golden(folder: Path) -> Path:
    return write_tokens(folder / "golden", [[5, 6, 7], [8, 9], []])


def read_bytes(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def test_bytes_equal_megatrons(tmp_path):
    tokens, index = read_bytes(golden(tmp_path))
    assert tokens.hex() == "05000600070008000900"
    assert hashlib.md5(tokens).hexdigest() == "2843924da0441eafd36609c126fff5b4"
    assert len(index) == 90
    assert hashlib.md5(index).hexdigest() == "6759f7a902d7f555156c02b1c2f099f1"


@pytest.mark.parametrize(
    ("vocab_size", "name"), [(257, "uint16"), (65499, "uint16"), (65500, "int32"), (1 << 18, "int32")]
)
def test_token_type_is_megatrons(vocab_size, name):
    assert token_type(vocab_size).name == name


sequences = st.lists(st.integers(0, 65535), max_size=8)


@given(st.lists(st.lists(sequences, max_size=3), max_size=8), st.sampled_from([4096, 100_000]))
@settings(deadline=None)  # machines are busy
def test_round_trip(tmp_path_factory, documents, vocab_size):
    prefix = tmp_path_factory.mktemp("round") / "file.with.dots"
    with TokenWriter(prefix, token_type(vocab_size)) as writer:
        for document in documents:
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()
    read = IndexedTokens(prefix)
    flat = [sequence for document in documents for sequence in document]
    assert [read.tokens(number).tolist() for number in range(read.num_sequences)] == flat
    assert np.diff(read.documents).tolist() == [len(document) for document in documents]
    assert read.num_documents == len(documents) == writer.num_documents
    assert read.num_tokens == sum(map(len, flat)) == writer.num_tokens
    assert read.stream.tolist() == [token for sequence in flat for token in sequence]
    for start in range(len(flat) + 1):
        for stop in range(start, len(flat) + 1):
            assert read.tokens_in(range(start, stop)) == sum(map(len, flat[start:stop]))


def test_a_part_of_a_sequence(tmp_path):
    assert IndexedTokens(golden(tmp_path)).tokens(0, 1, 3).tolist() == [6, 7]


@pytest.mark.parametrize(
    ("at", "change", "cause"),
    [
        (0, b"X", "not a Megatron .idx file"),
        (9, struct.pack("<Q", 2), "its version is 2; only 1 is supported"),
        (17, b"\x00", "its dtype code is 0"),
        (17, b"\x09", "its dtype code is 9"),
        (17, b"\x06", "float64, which cannot store token ids"),
        (18, struct.pack("<Q", 3), "3 sequences and 4 document entries need 102"),
        (26, struct.pack("<Q", 3), "2 sequences and 3 document entries need 82"),
        (18, struct.pack("<QQ", 4, 1), "document index goes from"),
        (LENGTHS_AT, struct.pack("<i", -1), "sequence 0 has a length of -1"),
        (LENGTHS_AT, struct.pack("<i", 4), "sequence 1 begins at byte 6; the lengths before it add up to 8"),
        (LENGTHS_AT + 4, struct.pack("<i", 3), "it has 10 bytes, but its index says 12 (6 tokens of 2)"),
        (OFFSETS_AT, struct.pack("<q", 2), "sequence 0 begins at byte 2; the lengths before it add up to 0"),
        (OFFSETS_AT + 8, struct.pack("<q", 4), "sequence 1 begins at byte 4; the lengths before it add up to 6"),
        (DOCUMENTS_AT, struct.pack("<q", 1), "document index goes from 1 to 2 instead of 0 to 2"),
        (DOCUMENTS_AT + 24, struct.pack("<q", 1), "document index goes from 0 to 1 instead of 0 to 2"),
        (DOCUMENTS_AT + 8, struct.pack("<q", 3), "document 1 ends before it begins"),
    ],
)
def test_an_altered_index_is_refused(tmp_path, at, change, cause):
    prefix = golden(tmp_path)
    index = bytearray(read_bytes(prefix)[1])
    index[at : at + len(change)] = change
    Path(f"{prefix}.idx").write_bytes(index)
    with pytest.raises(DataError) as caught:
        IndexedTokens(prefix)
    assert cause in str(caught.value)
    assert "Run `megalaunch preprocess` again" in str(caught.value)


def test_a_truncated_index_is_refused(tmp_path):
    prefix = golden(tmp_path)
    index = read_bytes(prefix)[1]
    for length in range(len(index)):
        Path(f"{prefix}.idx").write_bytes(index[:length])
        with pytest.raises(DataError, match=r"golden\.idx"):
            IndexedTokens(prefix)


@given(st.data())
@settings(deadline=None)  # machines are busy
def test_a_random_index_is_read_or_refused(tmp_path_factory, data):
    prefix = golden(tmp_path_factory.mktemp("fuzz"))
    index = bytearray(read_bytes(prefix)[1])
    for _ in range(data.draw(st.integers(1, 4))):
        index[data.draw(st.integers(0, len(index) - 1))] = data.draw(st.integers(0, 255))
    Path(f"{prefix}.idx").write_bytes(index)
    try:
        read = IndexedTokens(prefix)
    except DataError:
        return
    assert read.num_tokens * read.dtype.itemsize == 10


@pytest.mark.parametrize("size", [0, 9, 11])
def test_bin_and_index_must_fit(tmp_path, size):
    prefix = golden(tmp_path)
    with Path(f"{prefix}.bin").open("r+b") as file:
        file.truncate(size)
    with pytest.raises(DataError, match=rf"golden\.bin: it has {size} bytes, but its index says 10 \(5 tokens of 2\)"):
        IndexedTokens(prefix)


def test_an_index_of_multimodal_data_is_named(tmp_path):
    prefix = golden(tmp_path)
    with Path(f"{prefix}.idx").open("ab") as file:
        file.write(b"\x00\x01")
    with pytest.raises(DataError, match="a mode for each sequence"):
        IndexedTokens(prefix)


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("golden.bin", "without .bin: "),
        ("golden.idx", "without .idx: "),
        ("gold", "Did you mean "),
        ("other", "A prefix is"),
    ],
)
def test_a_missing_file_comes_with_a_hint(tmp_path, asked, hint):
    golden(tmp_path)
    with pytest.raises(DataError) as caught:
        IndexedTokens(tmp_path / asked)
    assert "no such file" in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize(("vocab_size", "token"), [(300, 65536), (300, -1), (70_000, 2**31)])
def test_a_token_that_does_not_fit_is_refused(tmp_path, vocab_size, token):
    with pytest.raises(DataError, match=f"token {token} of document 0 does not fit"):
        write_tokens(tmp_path / "x", [[1, token]], vocab_size)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_writer_leaves_the_old_files_alone(tmp_path):
    before = read_bytes(golden(tmp_path))

    def fail() -> None:
        with TokenWriter(tmp_path / "golden", token_type(300)) as writer:
            writer.add_sequence([1])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert read_bytes(tmp_path / "golden") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["golden.bin", "golden.idx"]


def test_an_index_never_stands_beside_other_tokens(tmp_path, monkeypatch):
    """A kill between the two renames must not leave an old index on new tokens."""
    golden(tmp_path)
    real, states = Path.replace, []

    def replace(source, target):
        states.append((target.name, (tmp_path / "golden.idx").exists()))
        return real(source, target)

    monkeypatch.setattr(Path, "replace", replace)
    golden(tmp_path)
    assert states == [("golden.bin", False), ("golden.idx", False)]


def test_two_writers_of_one_prefix(tmp_path):
    with TokenWriter(tmp_path / "x", token_type(300)) as first:
        with pytest.raises(DataError, match="another process is writing this file"):
            TokenWriter(tmp_path / "x", token_type(300))
        first.add_sequence([1])
        first.end_document()
    assert write_tokens(tmp_path / "x", [[2]]) == tmp_path / "x"
    assert IndexedTokens(tmp_path / "x").stream.tolist() == [2]


KILLED_WRITER = """
import sys, time
from pathlib import Path
from megalaunch.data.indexed_dataset.builder import TokenWriter, token_type
with TokenWriter(Path(sys.argv[1]), token_type(300)) as writer:
    for number in range(1000):
        writer.add_sequence([1] * 1000)
        writer.end_document()
    print("writing", flush=True)
    time.sleep(60)
"""


def test_a_killed_writer_leaves_nothing_under_a_final_name(tmp_path):
    prefix = tmp_path / "x"
    process = subprocess.Popen([sys.executable, "-c", KILLED_WRITER, prefix], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"writing\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert [path.name for path in tmp_path.iterdir()] == [".x.bin.unfinished"]
    write_tokens(prefix, [[1, 2]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]
    assert IndexedTokens(prefix).stream.tolist() == [1, 2]


@contextmanager
def files_of_1000_bytes_at_most():
    """Around the writing alone: pytest's own output may go to a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("documents", "length"), [(1, 100_000), (100, 8), (2, 300)])
def test_a_full_disk_is_reported_in_tokens_index_and_flush(tmp_path, documents, length):
    """In the tokens at once, in the index (100 documents), or when buffered tokens are forced out."""
    said = pytest.raises(DataError, match=r"x: cannot write it: File too large\. Free space there")
    with said, files_of_1000_bytes_at_most():
        write_tokens(tmp_path / "x", [[1] * length] * documents)
    assert list(tmp_path.iterdir()) == []


def test_a_symbolic_link_is_not_followed(tmp_path):
    (tmp_path / ".x.bin.unfinished").symlink_to(tmp_path / "other")
    with pytest.raises(DataError, match="cannot write here"):
        write_tokens(tmp_path / "x", [[1]])
    assert not (tmp_path / "other").exists()


def test_a_file_in_place_of_the_directory_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write here"):
        TokenWriter(tmp_path / "file" / "x", token_type(300))
