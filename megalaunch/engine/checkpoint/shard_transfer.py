"""Copy a shard of a local checkpoint: to a rank of another node, which writes it there, or from memory to disk.

Between ranks, a message with the small files comes first, then the file of the tensors in pieces. The receiver compares
all hashes with the manifest. Each side transfers every byte even if its disk fails, so that the other one does not wait
for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from megalaunch.engine.checkpoint.atomic_directory import Wrote, atomic_directory, count_bytes
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.safetensors_file import HashedFile
from megalaunch.rundir.checkpoint.local_shards import SHARD_TENSORS
from megalaunch.rundir.checkpoint.manifest import read_manifest

_PIECE_BYTES = 1 << 24


def send_shard(directory: Path, target: int, group: dist.ProcessGroup | None) -> None:
    """Send a shard of this node to the rank `target`, which receives it by `receive_shard`.

    Raises nothing for files that cannot be read: the receiver finds that the hashes do not fit.
    """
    texts: dict[str, str] = {}
    size = 0
    with suppress(OSError, ValueError):
        texts, size = _read_texts(directory), (directory / SHARD_TENSORS).stat().st_size
    message = json.dumps({"texts": texts, "size": size}).encode()
    dist.send(torch.tensor([len(message)]), target, group=group)
    dist.send(_as_tensor(message), target, group=group)
    for piece in _read_pieces(directory / SHARD_TENSORS, size):
        dist.send(_as_tensor(piece), target, group=group)


def copy_shard(source: Path, directory: Path, wrote: Wrote, check: Callable[[], None] = lambda: None) -> None:
    """Copy a shard on this node, complete or not at all, and compare its hashes with the manifest.

    Args:
        source: the shard's directory.
        directory: that of the copy; its name has the step.
        wrote, check: as `receive_shard`'s.

    Raises:
        CheckpointError: it cannot be copied, or is damaged.
    """
    try:
        texts, size = _read_texts(source), (source / SHARD_TENSORS).stat().st_size
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{source} cannot be read: {error}") from error
    with atomic_directory(directory, size) as unfinished:
        _write(unfinished, texts, _read_pieces(source / SHARD_TENSORS, size), count_bytes(size, wrote))
        check()


def _read_texts(directory: Path) -> dict[str, str]:
    """Return the small files of a shard. Raises OSError, or ValueError for one that is no text."""
    return {path.name: path.read_text(encoding="utf-8") for path in directory.glob("*.json")}


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _read_pieces(path: Path, size: int) -> Iterator[bytes]:
    """Yield `size` bytes of a file in pieces, with zeros for those that cannot be read."""
    for start in range(0, size, _PIECE_BYTES):
        count = min(size - start, _PIECE_BYTES)
        try:
            with path.open("rb") as file:
                file.seek(start)
                piece = file.read(count)
        except OSError:
            piece = b""
        yield piece.ljust(count, b"\0")


def receive_shard(
    directory: Path,
    source: int,
    group: dist.ProcessGroup | None,
    wrote: Wrote,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write the shard that the rank `source` sends, complete or not at all.

    Args:
        directory: the shard's directory in the folder of this node; its name has the step.
        source: the sender.
        group: a gloo group.
        wrote: progress callback: (bytes written, total bytes).
        check: called before the shard gets its name; may raise Superseded.

    Raises:
        CheckpointError: it cannot be written, or is not what its manifest describes.
    """
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source, group=group)
    message = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(message, source, group=group)
    content = json.loads(message.numpy().tobytes())
    size = int(content["size"])
    pieces = _receive_pieces(size, source, group)
    try:
        with atomic_directory(directory, size) as unfinished:
            _write(unfinished, content["texts"], pieces, count_bytes(size, wrote))
            check()
    finally:
        for _ in pieces:  # what a failed write has not taken
            pass


def _receive_pieces(size: int, source: int, group: dist.ProcessGroup | None) -> Iterator[memoryview]:
    for start in range(0, size, _PIECE_BYTES):
        piece = torch.empty(min(size - start, _PIECE_BYTES), dtype=torch.uint8)
        dist.recv(piece, source, group=group)
        yield piece.numpy().data


def _write(
    directory: Path, texts: dict[str, str], pieces: Iterator[bytes | memoryview], wrote: Callable[[int], None]
) -> None:
    """Write the files of a shard. Raises CheckpointError if their hashes are not those of the manifest."""
    records = []
    for name, text in texts.items():
        if Path(name).name != name:
            raise CheckpointError(f"the copy names a file outside of its folder: {name!r}")
        with HashedFile(directory / name) as file:
            file.write(text.encode())
        records.append(file.record)
    with HashedFile(directory / SHARD_TENSORS, wrote) as file:
        for piece in pieces:
            file.write(piece)
    try:
        expected = set(read_manifest(directory))
    except ValueError as error:
        raise CheckpointError(f"the copy is incomplete: {error}") from error
    if not expected <= {*records, file.record}:
        raise CheckpointError("the copy does not have the hashes of its manifest")
