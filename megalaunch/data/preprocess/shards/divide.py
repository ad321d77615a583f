"""Divide inputs into shards of about the same number of bytes; the same inputs always give the same shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.chunking import Chunk, Position, chunks, line_end
from megalaunch.data.preprocess.inputs import Input, open_source
from megalaunch.data.preprocess.settings import Format, Settings

_READ_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Shard:
    """Consecutive records of the inputs.

    Attributes:
        number: its number, from 0.
        inputs: the files with its records, in order.
        start: byte of the first file at which its records begin.
        end: byte of the last file at which they end.
    """

    number: int
    inputs: list[Input]
    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes of the inputs in this shard."""
        return sum(entry.size for entry in self.inputs[:-1]) + self.end - self.start

    @property
    def hashed(self) -> list[Input]:
        """The files that begin in this shard, so that each file is hashed in one shard."""
        return self.inputs[1:] if self.start else self.inputs

    def chunks(self, settings: Settings, start: Position) -> Iterator[Chunk]:
        """Yield the chunks of the shard from `start`. Raises DataError for files that cannot be read at all."""
        return chunks([*self.inputs[:-1], replace(self.inputs[-1], size=self.end)], settings, start)

    def lines_before(self) -> int:
        """Return the number of lines of the first file before the shard."""
        lines, left = 0, self.start
        with open_source(self.inputs[0].path) as file:
            while left and (block := file.read(min(left, _READ_AT_ONCE))):
                lines += block.count(b"\n")
                left -= len(block)
        return lines


def divide(inputs: Sequence[Input], count: int) -> list[Shard]:
    """Divide the inputs into `count` shards by bytes: plain jsonl at line ends, other files only between them.

    Raises:
        DataError: standard input is given, or the inputs cannot be divided into so many shards.
    """
    if any(entry.is_stdin for entry in inputs):
        raise DataError("standard input cannot be divided into shards", fix="Give files, or leave out --shards.")
    borders = _borders(inputs, count)
    if len(borders) <= count:
        most = len(borders) - 1
        while most > 1 and len(_borders(inputs, most)) <= most:
            most -= 1
        raise DataError(
            f"{count:,} shards are too many: some would have no records, as a jsonl file is divided at the end of a "
            "line, and other files are not divided",
            fix=f"Give --shards {most} or less, or decompress large jsonl files.",
        )
    return [_shard(inputs, number, *pair) for number, pair in enumerate(pairwise(borders))]


def _borders(inputs: Sequence[Input], count: int) -> list[Position]:
    """Return the different borders of `count` shards of about the same size, with the beginning and the end.

    Borders before and after an empty file are one: there are as many bytes before both.
    """
    before = list(accumulate((entry.size for entry in inputs), initial=0))
    total = before[-1]
    between = (_border(inputs, total * number // count) for number in range(1, count))
    by_byte = {before[border.file] + border.offset: border for border in between}
    inner = [by_byte[byte] for byte in sorted(by_byte) if 0 < byte < total]
    return [Position(0, 0), *inner, Position(len(inputs), 0)]


def _border(inputs: Sequence[Input], byte: int) -> Position:
    """Return the position near `byte` of all inputs at which they can be divided."""
    number = 0
    while number < len(inputs) and byte >= inputs[number].size:
        byte -= inputs[number].size
        number += 1
    if not byte or number == len(inputs):
        return Position(number, 0)
    entry = inputs[number]
    if entry.format is Format.JSONL and entry.is_plain:
        with open_source(entry.path) as file:
            byte = line_end(file, byte, entry.size)
        return Position(number, byte) if byte < entry.size else Position(number + 1, 0)
    return Position(number, 0) if byte < entry.size / 2 else Position(number + 1, 0)


def _shard(inputs: Sequence[Input], number: int, start: Position, end: Position) -> Shard:
    if end.offset:
        return Shard(number, list(inputs[start.file : end.file + 1]), start.offset, end.offset)
    files = list(inputs[start.file : end.file])
    return Shard(number, files, start.offset, files[-1].size)
