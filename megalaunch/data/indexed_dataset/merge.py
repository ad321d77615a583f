"""Merges several prefixes of token files into one and splits one into several, in constant memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.errors import DataError, cannot, open_output
from megalaunch.data.indexed_dataset.block_hashes import BlockHashes, describe
from megalaunch.data.indexed_dataset.builder import write_documents, write_header, write_offsets
from megalaunch.data.indexed_dataset.dataset import IndexedTokens, bin_path, idx_path
from megalaunch.data.indexed_dataset.report import merge_reports, report_path, write_report
from megalaunch.fs import AtomicFile, sync_directory

_ENTRIES_AT_ONCE = 1 << 20
_BYTES_AT_ONCE = 1 << 24


def expand_prefixes(sources: Sequence[Path]) -> list[Path]:
    """Replace each directory by the prefixes in it, sorted by name as Megatron does.

    Raises:
        DataError: a directory holds no token files.
    """
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            inside = sorted(path.with_suffix("") for path in source.glob("*.idx") if not path.name.startswith("."))
            if not inside:
                raise DataError(
                    "the directory has no token files", file=source, fix="Give prefixes, or their directory."
                )
            found += inside
        else:
            found.append(source)
    return found


def merge(sources: Sequence[Path], target: Path, *, overwrite: bool = False) -> IndexedTokens:
    """Write all documents of the sources in order under `target`, as if their texts were preprocessed in one run.

    If each source has a report, `target` gets their merged report.

    Raises:
        DataError: a source is unusable, dtypes or tokenizers differ, the target is one of the sources, or it exists and
            `overwrite` is false.
    """
    parts = [IndexedTokens(source) for source in expand_prefixes(sources)]
    for part in parts:
        if part.dtype != parts[0].dtype:
            raise DataError(
                f"its tokens are {part.dtype.name}, but those of {parts[0].prefix} are {parts[0].dtype.name}",
                file=part.prefix,
                fix="They come from different vocabularies; preprocess their texts with one tokenizer.",
            )
        _refuse_source(part, target)
    if not overwrite:
        _refuse_existing(target)
    _write(target, [(part, range(part.num_documents)) for part in parts])
    return IndexedTokens(target)


def split(source: Path, target: Path, shares: Sequence[float], *, overwrite: bool = False) -> list[Path]:
    """Split the documents of `source` into consecutive parts `target_0`, `target_1`... of these shares.

    Boundaries are the rounded cumulative sums of the shares; merging the parts gives the source again.

    Raises:
        DataError: the source is unusable or is one of the parts, a part cannot be written, or exists and `overwrite` is
            false.
    """
    tokens = IndexedTokens(source)
    sums = np.cumsum(np.array(shares, np.float64))
    borders = [0, *(round(float(share) * tokens.num_documents) for share in sums / sums[-1])]
    digits = len(str(len(shares) - 1))
    made = [target.with_name(f"{target.name}_{number:0{digits}d}") for number in range(len(shares))]
    for part in made:
        _refuse_source(tokens, part)
        if not overwrite:
            _refuse_existing(part)
    for part, (first, last) in zip(made, pairwise(borders), strict=True):
        _write(part, [(tokens, range(first, last))])
    return made


def _refuse_source(source: IndexedTokens, target: Path) -> None:
    """Raise DataError if writing `target` would replace the files of `source`."""
    if source.prefix.resolve() == target.resolve():
        raise DataError("it is both source and target", file=target, fix="Choose another --output-prefix.")


def _refuse_existing(target: Path) -> None:
    """Raise DataError if there are files that writing `target` would replace."""
    for path in (bin_path(target), idx_path(target)):
        if path.exists():
            raise DataError("it exists", file=path, fix="Give another --output-prefix, or --overwrite to replace it.")


def _write(target: Path, parts: Sequence[tuple[IndexedTokens, range]]) -> None:
    """Write the documents of each range under `target`: both files complete, or neither; and their report."""
    report = merge_reports([source.prefix for source, _ in parts])
    hashes = BlockHashes()
    unfinished: list[AtomicFile] = []
    try:
        for path in (bin_path(target), idx_path(target)):
            unfinished.append(open_output(path))
        tokens, index = unfinished
        for source, documents in parts:
            _copy_tokens(source, documents, tokens, hashes)
        dtype = parts[0][0].dtype
        spans = [(source, _sequences(source, documents)) for source, documents in parts]
        write_header(
            index.file, dtype, sum(len(span) for _, span in spans), sum(len(documents) for _, documents in parts)
        )
        for block in _lengths(spans):
            index.file.write(block.data)
        write_offsets(index.file, dtype, _lengths(spans))
        write_documents(index.file, _counts(parts))
        for file in unfinished:
            file.sync()
        # Remove the old index before renaming: a crash in between leaves no index rather than one of other tokens.
        index.path.unlink(missing_ok=True)
        report_path(target).unlink(missing_ok=True)  # it describes the replaced files
        tokens.publish()
        index.publish()
        sync_directory(target.parent)
        if report is not None:
            described = {
                tokens.path.name: describe(tokens.path, hashes),
                index.path.name: describe(index.path),
            }
            made = IndexedTokens(target)
            counts = {"documents": made.num_documents, "written": made.num_documents, "tokens": made.num_tokens}
            write_report(target, {**report, "counts": counts, "outputs": described})
    except OSError as error:
        raise cannot("write it", target, error, "Free space there, or choose another folder.") from error
    finally:
        for file in unfinished:
            file.discard()


def _sequences(source: IndexedTokens, documents: range) -> range:
    return range(int(source.documents[documents.start]), int(source.documents[documents.stop]))


def _copy_tokens(source: IndexedTokens, documents: range, target: AtomicFile, hashes: BlockHashes) -> None:
    """Copy the tokens of some documents and add them to the hashes."""
    sequences, size = _sequences(source, documents), source.dtype.itemsize
    left = source.tokens_in(sequences) * size
    with bin_path(source.prefix).open("rb") as file:
        file.seek(source.first_token(sequences.start) * size)
        while left:
            block = file.read(min(left, _BYTES_AT_ONCE))
            if not block:
                raise DataError("it was truncated while being read", file=bin_path(source.prefix))
            target.file.write(block)
            hashes.add(block)
            left -= len(block)


def _blocks(documents: range) -> Iterator[tuple[int, int]]:
    for start in range(documents.start, documents.stop, _ENTRIES_AT_ONCE):
        yield start, min(start + _ENTRIES_AT_ONCE, documents.stop)


def _lengths(spans: Sequence[tuple[IndexedTokens, range]]) -> Iterator[NDArray[Any]]:
    for source, sequences in spans:
        for first, last in _blocks(sequences):
            yield np.ascontiguousarray(source.lengths[first:last])


def _counts(parts: Sequence[tuple[IndexedTokens, range]]) -> Iterator[NDArray[Any]]:
    for source, documents in parts:
        for first, last in _blocks(documents):
            yield np.diff(source.documents[first : last + 1])
