"""Read the pickles of a Megatron checkpoint and print their description as JSON. No other file unpickles.

Run by path in an isolated process (`python -I -S safe_unpickler.py DIRECTORY`). Names in a pickle are looked up in a
table of inert replacements and never imported. If any name is not in the table, the output lists those names only.
"""

from __future__ import annotations

import ctypes
import io
import json
import math
import pickle
import resource
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

_MEMORY_BYTES = 4 << 30
# CPU time: a start, plus the time for files of their size (measured: 0.3 ms a chunk, of 150 bytes or more).
_START_SECONDS, _BYTES_A_SECOND, _MOST_SECONDS = 20, 50_000, 600
# Limits far above what real arguments and sizes need. A pickle of some hundred bytes can describe a value whose output
# would never end: a list of twice the same list, of twice the same list, and so on.
_MOST_VALUES, _MOST_TEXT, _DEEPEST, _MOST_NAME = 100_000, 4_000_000, 20, 1000
_LARGEST = 2**62
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # linux/sched.h
_DTYPES = {
    "torch.float64": ("F64", 8, "DoubleStorage"),
    "torch.float32": ("F32", 4, "FloatStorage"),
    "torch.float16": ("F16", 2, "HalfStorage"),
    "torch.bfloat16": ("BF16", 2, "BFloat16Storage"),
    "torch.int64": ("I64", 8, "LongStorage"),
    "torch.int32": ("I32", 4, "IntStorage"),
    "torch.int16": ("I16", 2, "ShortStorage"),
    "torch.int8": ("I8", 1, "CharStorage"),
    "torch.uint8": ("U8", 1, "ByteStorage"),
    "torch.bool": ("BOOL", 1, "BoolStorage"),
}
# Names that are no weights (optimizer, schedules, random states): skipped.
_NOT_WEIGHTS = ("optimizer.", "chained_", "opt_param_scheduler", "rng_state", "rerun_state")


class InertRecord:
    """Replaces an object of any class: stores its constructor arguments and state, has no methods to call."""

    name = ""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __new__(cls, *_: Any, **__: Any) -> InertRecord:
        """Set all attributes, whichever opcode creates the object."""
        made = super().__new__(cls)
        made.arguments, made.state = (), None
        return made


class CorruptCheckpoint(ValueError):
    """A file that Megatron did not write, or a damaged one; the message says how."""


def _stand_in(name: str) -> type[InertRecord]:
    """Make the inert class that replaces the class `name`."""
    return type("Record", (InertRecord,), {"name": name})


def _latin(text: str, encoding: str = "latin1") -> bytes:
    """Replace `_codecs.encode`, with which pickle protocol 2 stores bytes."""
    return text.encode("latin1")


def _first(value: Any, *_: Any) -> Any:
    """Return the first argument."""
    return value


_RECORDS = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    "pathlib.PosixPath",
    "signal.Signals",
    "_io.BytesIO",
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.dtypes.UInt32DType",
    "torch.device",
    "torch._utils._rebuild_tensor_v2",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.filesystem._StoragePrefix",
    *(
        f"torch.distributed.checkpoint.metadata.{name}"
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *(
        f"torch.distributed.checkpoint.planner.{name}"
        for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
    ),
    "megatron.core.enums.ModelType",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphScope",
)
ALLOWED: dict[str, Any] = {
    **{name: _stand_in(name) for name in _RECORDS},
    **{name: name for name in (*_DTYPES, "torch.strided")},
    **{f"torch.{storage}": dtype for dtype, (_, _, storage) in _DTYPES.items()},
    "torch.Size": tuple,
    "torch.serialization._get_layout": _first,
    "collections.OrderedDict": OrderedDict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "_codecs.encode": _latin,
}


class _PlainUnpickler:
    """Converts values to JSON types, up to a limit on their number and text: beyond it, CorruptCheckpoint is raised."""

    def __init__(self) -> None:
        self._values, self._text = _MOST_VALUES, _MOST_TEXT

    def value(self, value: Any, depth: int = 0) -> Any:
        """Convert numbers, strings and lists; anything else becomes `<its type>`."""
        self._values -= 1
        if self._values < 0 or depth > _DEEPEST:
            raise CorruptCheckpoint("common.pt: its arguments have too many values or too deeply nested lists")
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise CorruptCheckpoint("common.pt: its arguments have a number that is too large")
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, list | tuple):
            return [self.value(item, depth + 1) for item in value]
        return self.text(f"<{value.name}>" if isinstance(value, InertRecord) else f"<{type(value).__name__}>")

    def text(self, text: str) -> str:
        """Return the string and count its length; a shared string counts each time."""
        self._text -= len(text)
        if self._text < 0:
            raise CorruptCheckpoint("common.pt: its arguments have too much text")
        return text


class RestrictedUnpickler(pickle.Unpickler):
    """Resolves only names in ALLOWED. Other names are added to `refused` and replaced, so that all are found."""

    def __init__(self, file: BinaryIO, where: str, refused: dict[str, str]) -> None:
        super().__init__(file)
        self._where, self._refused = where, refused

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of a class or function."""
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"  # Python 2's name, which protocol 2 uses
        if full not in ALLOWED:
            self._refused.setdefault(full, self._where)
            return _stand_in(full)
        return ALLOWED[full]

    def persistent_load(self, pid: Any) -> Any:
        """Return a tensor's storage reference: ("storage", dtype, key, device, length)."""
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise CorruptCheckpoint(f"{self._where}: a storage of an unknown type")
        return pid


class _Window(io.RawIOBase):
    """A byte range of a file, as a file."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._begin + self._at)
        data = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class TorchZipReader:
    """One torch.save archive inside a file: a zip with uncompressed entries."""

    def __init__(self, path: Path, begin: int, length: int, refused: dict[str, str]) -> None:
        self.path, self.begin, self._refused = path, begin, refused
        self._file = path.open("rb")
        try:
            self._zip = zipfile.ZipFile(_Window(self._file, begin, length))
        except zipfile.BadZipFile as error:
            raise CorruptCheckpoint(
                f"{path.name}: at byte {begin} is not in torch.save's zip format ({error})"
            ) from error
        self._entries = {entry.filename.partition("/")[2]: entry for entry in self._zip.infolist()}

    def __enter__(self) -> TorchZipReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def content(self) -> Any:
        """Return the unpickled object, with tensors and all other objects replaced by inert records."""
        if "byteorder" in self._entries and self._zip.read(self._entries["byteorder"]) != b"little":
            raise CorruptCheckpoint(f"{self.path.name}: was written with another byte order")
        if "data.pkl" not in self._entries:
            raise CorruptCheckpoint(f"{self.path.name}: at byte {self.begin} is not a pickle of torch.save")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in self._entries.values()):
            raise CorruptCheckpoint(f"{self.path.name}: is compressed, which torch.save never does")
        return RestrictedUnpickler(
            io.BytesIO(self._zip.read(self._entries["data.pkl"])), self.path.name, self._refused
        ).load()

    def offset_of(self, key: str) -> tuple[int, int]:
        """Return a storage's position in the file and its size, both in bytes."""
        entry = self._entries.get(f"data/{key}")
        if entry is None or entry.compress_type != zipfile.ZIP_STORED:
            raise CorruptCheckpoint(f"{self.path.name}: at byte {self.begin} has no values of its tensor")
        self._file.seek(self.begin + entry.header_offset)
        header = self._file.read(30)
        names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return self.begin + entry.header_offset + 30 + names, entry.file_size


def _load(path: Path, refused: dict[str, str]) -> Any:
    with path.open("rb") as file:
        return RestrictedUnpickler(file, path.name, refused).load()


def describe(directory: Path, refused: dict[str, str]) -> dict[str, Any]:
    """Return the arguments, iteration and tensors of the checkpoint. Raises CorruptCheckpoint.

    The result is valid only if `refused` is empty.
    """
    with TorchZipReader(directory / "common.pt", 0, (directory / "common.pt").stat().st_size, refused) as archive:
        shared = archive.content()
    metadata = _load(directory / ".metadata", refused)
    if refused:
        return {}
    parts = _fields(metadata, "Metadata", "state_dict_metadata", "storage_data")
    storage_info = {}
    for index, info in parts["storage_data"].items():
        at = _fields(index, "MetadataIndex", "fqn")
        where = None if at.get("offset") is None else _sizes(at["offset"], "an offset")
        if isinstance(at["fqn"], str):
            storage_info[at["fqn"], where] = _fields(info, "_StorageInfo", "relative_path", "offset", "length")
    tensors = {}
    for name, entry in parts["state_dict_metadata"].items():
        if isinstance(entry, InertRecord) and entry.name.endswith("TensorStorageMetadata") and _is_weight(name):
            tensors[name] = _tensor(directory, name, entry, storage_info, refused)
    plain = _PlainUnpickler()
    arguments = dict(_arguments(shared, plain))
    return {"arguments": arguments, "iteration": plain.value(shared.get("iteration")), "tensors": tensors}


def _is_weight(name: Any) -> bool:
    if isinstance(name, str) and len(name) > _MOST_NAME:
        raise CorruptCheckpoint(f".metadata: a tensor with a name of {len(name)} characters")
    return isinstance(name, str) and not name.startswith(_NOT_WEIGHTS)


def _sizes(values: Any, what: str) -> tuple[int, ...]:
    """Validate sizes: a short list of integers from 0 that fit torch's integers. Raises CorruptCheckpoint."""
    if not isinstance(values, tuple | list) or len(values) > 64:
        raise CorruptCheckpoint(f".metadata: {what} is not a short list of integers")
    if not all(type(value) is int and 0 <= value < _LARGEST for value in values):
        raise CorruptCheckpoint(f".metadata: {what} has a number that is not a size")
    return tuple(values)


def _fields(record: Any, kind: str, *names: str) -> dict[str, Any]:
    """Return the state of a record of class `kind`, which must have the fields `names`. Raises CorruptCheckpoint."""
    state = record.state if isinstance(record, InertRecord) and record.name.endswith(f".{kind}") else None
    if not isinstance(state, dict) or any(name not in state for name in names):
        raise CorruptCheckpoint(f".metadata: a {kind} was expected")
    return state


def _tensor(
    directory: Path, name: str, entry: InertRecord, storage_info: Any, refused: dict[str, str]
) -> dict[str, Any]:
    """Return dtype, shape and chunks of one tensor, each chunk with the byte where its values begin."""
    fields = _fields(entry, "TensorStorageMetadata", "properties", "size", "chunks")
    state = fields["properties"].state
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CorruptCheckpoint(f".metadata: {name} has an unknown dtype")
    chunks = []
    for chunk in fields["chunks"]:
        box = _fields(chunk, "ChunkStorageMetadata", "offsets", "sizes")
        offsets, sizes = _sizes(box["offsets"], f"a chunk of {name}"), _sizes(box["sizes"], f"a chunk of {name}")
        info = storage_info.get((name, offsets))
        if info is None:
            raise CorruptCheckpoint(f".metadata: has no file for the chunk of {name} at {list(offsets)}")
        file = info["relative_path"]
        if not isinstance(file, str) or "/" in file or file.startswith(".") or len(file) > _MOST_NAME:
            raise CorruptCheckpoint(f".metadata: {name} is in {file!r:.100}, which is not a file of the checkpoint")
        begin, length = _sizes([info["offset"], info["length"]], f"a position of {name}")
        with TorchZipReader(directory / file, begin, length, refused) as archive:
            first = _values(archive, name, dtype, sizes) if not refused else 0
        chunks.append({"offsets": list(offsets), "shape": list(sizes), "file": file, "begin": first})
    return {"dtype": _DTYPES[dtype][0], "shape": list(_sizes(fields["size"], f"a shape of {name}")), "chunks": chunks}


def _values(archive: TorchZipReader, name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Return the file position of a chunk's values. Raises CorruptCheckpoint unless they are complete and in order."""
    made = archive.content()
    if archive._refused:
        return 0
    if not isinstance(made, InertRecord) or made.name != "torch._utils._rebuild_tensor_v2" or len(made.arguments) < 4:
        raise CorruptCheckpoint(f"{archive.path.name}: {name} is not a plain tensor")
    storage, start, size, stride = made.arguments[:4]
    kind, size, stride = storage[1], _sizes(size, f"a chunk of {name}"), _sizes(stride, f"a chunk of {name}")
    (start,) = _sizes([start], f"a chunk of {name}")
    if not isinstance(kind, str) or kind != dtype or size != shape:
        raise CorruptCheckpoint(
            f"{archive.path.name}: a chunk of {name} has the shape {list(size)}, which contradicts .metadata"
        )
    expected = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if any(length > 1 and step != right for length, step, right in zip(shape, stride, expected, strict=True)):
        raise CorruptCheckpoint(f"{archive.path.name}: {name} is not contiguous")
    if not isinstance(storage[2], str):
        raise CorruptCheckpoint(f"{archive.path.name}: the storage of {name} has no key")
    begin, size_bytes = archive.offset_of(storage[2])
    width = _DTYPES[dtype][1]
    if (start + math.prod(shape)) * width > size_bytes:
        raise CorruptCheckpoint(f"{archive.path.name}: {name} is truncated")
    return begin + start * width


def _arguments(shared: Any, plain: _PlainUnpickler) -> Iterator[tuple[str, Any]]:
    """Yield Megatron's saved arguments as JSON types."""
    given = shared.get("args") if isinstance(shared, dict) else None
    if not isinstance(given, InertRecord) or not isinstance(given.state, dict):
        raise CorruptCheckpoint("common.pt: has no arguments of Megatron-LM (`args`)")
    for name, value in given.state.items():
        if isinstance(name, str):
            yield plain.text(name), plain.value(value)


# Exceptions that a damaged pickle causes: wrong types, an early end of file, too much data.
_DAMAGE: tuple[type[Exception], ...] = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    AttributeError,
    EOFError,
    IndexError,
    KeyError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


def main(directory: Path) -> dict[str, Any]:
    """Return the JSON output: a description, the refused names, or a problem."""
    refused: dict[str, str] = {}
    reply: dict[str, Any] = {}
    try:
        reply = describe(directory, refused)
    except OSError as error:
        reply = {"problem": f"cannot read {error.filename}: {error.strerror}"}
    except CorruptCheckpoint as error:
        reply = {"problem": str(error)}
    except _DAMAGE as error:
        reply = {"problem": f"it is damaged, or not a torch_dist checkpoint: {type(error).__name__}: {error}"}
    return {"refused": refused} if refused else reply


def seconds_for(directory: Path) -> int:
    """Return the CPU seconds that suffice for pickles of this size."""
    size = sum((directory / name).stat().st_size for name in (".metadata", "common.pt") if (directory / name).exists())
    return min(_START_SECONDS + size // _BYTES_A_SECOND, _MOST_SECONDS)


def _limit(set_limit: Callable[[int, tuple[int, int]], None], seconds: int) -> None:
    """Set resource limits: memory, CPU seconds, no writable files and no core dumps."""
    for kind, most in (
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        spare = 5 if kind == resource.RLIMIT_CPU and most + 5 <= hard % 2**63 else 0  # SIGXCPU says why, SIGKILL not
        set_limit(kind, (most, most + spare))


def _leave_network() -> None:
    """Move this process to a network namespace without an interface, where the system permits one.

    Root needs no user namespace for it, in which it could not read the files of others; other users do.
    """
    unshare = getattr(ctypes.CDLL(None), "unshare", None)  # Linux only
    if unshare is not None and unshare(_NEW_NETWORK):
        unshare(_NEW_USER | _NEW_NETWORK)


if __name__ == "__main__":
    _leave_network()
    _limit(resource.setrlimit, seconds_for(Path(sys.argv[1])))
    json.dump(main(Path(sys.argv[1])), sys.stdout)
