"""The safetensors files of a checkpoint: as the library reads and writes them, and nothing else is accepted."""

from __future__ import annotations

import contextlib
import io
import json
import random
from pathlib import Path

import pytest
import torch
from checkpoint_tensors import reference, same_bits
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.safetensors_file import DTYPE_NAMES, DTYPES, MappedFile, TensorSource, write_file
from megalaunch.rundir.checkpoint.header import DTYPE_BYTES, read_header


def write(path: Path, tensors: dict[str, torch.Tensor]):
    sources = {
        name: TensorSource(tensor.dtype, tuple(tensor.shape), lambda tensor=tensor: tensor)
        for name, tensor in tensors.items()
    }
    return write_file(path, sources)


def with_header(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_the_library_reads_what_we_write(tmp_path: Path):
    write(tmp_path / "ours.safetensors", reference())
    theirs = load_file(tmp_path / "ours.safetensors")
    assert set(theirs) == set(reference())
    assert all(same_bits(theirs[name], value) for name, value in reference().items())
    with safe_open(tmp_path / "ours.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_we_read_what_the_library_writes(tmp_path: Path):
    save_file(reference(), tmp_path / "theirs.safetensors", metadata={"any": "thing"})
    file = MappedFile(tmp_path / "theirs.safetensors")
    assert set(file.entries) == set(reference())
    assert all(same_bits(file.tensor(name), value) for name, value in reference().items())


def test_strided_and_transposed_tensors_are_written_by_value(tmp_path: Path):
    base = torch.arange(24.0).reshape(4, 6)
    write(tmp_path / "x.safetensors", {"turned": base.T, "every other": base[:, ::2]})
    file = MappedFile(tmp_path / "x.safetensors")
    assert torch.equal(file.tensor("turned"), base.T)
    assert torch.equal(file.tensor("every other"), base[:, ::2])


def test_reading_never_changes_the_file(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    write(path, {"x": torch.zeros(4)})
    before = path.read_bytes()
    MappedFile(path).tensor("x").fill_(1)
    assert path.read_bytes() == before


def entry(shape: object = (2,), offsets: object = (0, 8), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        ([1, 2], b"", "no mapping"),
        (b"{", b"", "bad safetensors header"),
        (b"\xff\xfe", b"", "bad safetensors header"),
        (b"[" * 100_000, b"", "bad safetensors header"),
        (b'{"x": ' + b"9" * 5000 + b"}", b"", "bad safetensors header"),
        ({"x": 3}, b"", "no tensor entry"),
        ({"x": {**entry(), "more": 1}}, b"8 bytes.", "no tensor entry"),
        ({"x": entry(dtype="F77")}, b"8 bytes.", "unknown dtype"),
        ({"x": entry(dtype=["F32"])}, b"8 bytes.", "unknown dtype"),
        ({"x": entry(shape=[-2])}, b"8 bytes.", "invalid sizes"),
        ({"x": entry(shape=[2.0])}, b"8 bytes.", "invalid sizes"),
        ({"x": entry(shape=[True, 2])}, b"8 bytes.", "invalid sizes"),
        ({"x": entry(shape="2")}, b"8 bytes.", "invalid sizes"),
        ({"x": entry(shape=[2**40, 2**40])}, b"8 bytes.", "invalid sizes"),
        ({"x": entry(shape=[0, 2**70], offsets=[0, 0])}, b"", "invalid sizes"),
        ({"x": entry(shape=[1] * 100)}, b"8 bytes.", "invalid sizes"),
        ({"x": entry(offsets=[0, 4])}, b"4byt", "does not need"),
        ({"x": entry(offsets=[8, 0])}, b"8 bytes.", "does not need"),
        ({"x": entry(offsets=[0, 4, 8])}, b"8 bytes.", "invalid sizes"),
        ({"x": entry(offsets=[8, 16])}, b"8 bytes.", "gap"),
        ({"x": entry(), "y": entry()}, b"8 bytes.", "overlap"),
        ({"x": entry(), "y": entry(offsets=[12, 20])}, b"20 bytes of something", "gap"),
        ({"x": entry()}, b"8 bytes. and more", "the file at"),
        ({"x": entry()}, b"short", "the file at"),
        (b'{"x": {"dtype":"U8","shape":[],"data_offsets":[0,1]}, "x": 1}', b"1", "occurs twice"),
    ],
)
def test_bad_headers_are_refused_by_name(tmp_path: Path, header: object, data: bytes, reason: str):
    with pytest.raises(CheckpointError, match=rf"bad\.safetensors: .*{reason}"):
        MappedFile(with_header(tmp_path / "bad.safetensors", header, data))


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 8, b"\xff" * 100, (9).to_bytes(8, "little") + b"{}"])
def test_files_too_short_for_their_header(tmp_path: Path, content: bytes):
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors: is no safetensors file, or is truncated"):
        MappedFile(tmp_path / "bad.safetensors")


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"cannot read .*gone\.safetensors: No such file"):
        MappedFile(tmp_path / "gone.safetensors")


def mutated(text: bytes, chance: random.Random) -> bytes:
    """One to four random edits: a byte replaced, removed or doubled, digits grown, pieces repeated."""
    data = bytearray(text)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data))
        kind = chance.randrange(5)
        if kind == 0:
            data[at] = chance.randrange(256)
        elif kind == 1:
            del data[at : at + chance.randint(1, 8)]
        elif kind == 2:
            data[at:at] = data[at : at + chance.randint(1, 30)]
        elif kind == 3:
            data[at:at] = chance.choice([b"9" * 25, b"-1", b"null", b"[[", b'"', b"1e9", b"\\u0000"])
        else:
            data[at : at + 1] = str(chance.randrange(100)).encode()
        if not data:
            data = bytearray(b" ")
    return bytes(data)


def test_ten_thousand_mutated_headers_are_refused_or_right(tmp_path: Path):
    """Either CheckpointError, or tensors that lie within the file; never anything else."""
    path = tmp_path / "x.safetensors"
    write(path, {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.int64), "c": torch.ones(())})
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header, data = whole[8 : 8 + length], whole[8 + length :]
    chance = random.Random(20)
    accepted = []
    for round_ in range(10_000):
        text = mutated(header, chance)
        said = len(text) if round_ % 4 else max(0, len(text) + chance.randint(-9, 9))
        content = said.to_bytes(8, "little") + text + data
        with contextlib.suppress(CheckpointError):
            read_header("x", io.BytesIO(content).read, len(content))
            accepted.append(content)
    assert 0 < len(accepted) < 5000
    for content in accepted[:300]:
        path.write_bytes(content)
        file = MappedFile(path)
        assert sum(file.tensor(name).nbytes for name in file.entries) == len(data)


def test_both_wings_know_the_same_dtypes():
    assert {DTYPE_NAMES[dtype]: dtype.itemsize for dtype in DTYPES.values()} == dict(DTYPE_BYTES)


def test_a_file_of_any_size_is_read():
    """Two tensors far into a file of 12 GB: only its header is at hand."""
    gigabytes = {"first": [0, 4 * 10**9], "second": [4 * 10**9, 12 * 10**9]}
    header = {
        name: {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}
        for name, (begin, end) in gigabytes.items()
    }
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text
    entries = read_header("x", io.BytesIO(content).read, len(content) + 12 * 10**9)
    assert entries["second"].end == len(content) + 12 * 10**9
