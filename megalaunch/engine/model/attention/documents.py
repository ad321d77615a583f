"""The lengths of packed documents, read from document ids: attention and partitions are planned on the host."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megalaunch.engine.torch_private import base_of_view

_host_ids: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()


def derive_documents(derived: Tensor, source: Tensor) -> None:
    """Note that document ids are a copy or a shard of others, which begin on the host, for `host_document_ids`.

    Attention is planned on the host, which then need not wait for a device.
    """
    if derived is not source:
        whole = host_document_ids(source)
        _host_ids[derived] = source if whole is None else whole


def host_document_ids(documents: Tensor) -> Tensor | None:
    """Return the ids of full samples [B, S] on the host, of which the given ones were derived; None: not known.

    Those of a microbatch that a pipeline has split off are rows of the ids of all microbatches.
    """
    joined = base_of_view(documents)
    is_split = joined is not None and joined.shape[1:] == documents.shape[1:] and joined.stride() == documents.stride()
    if documents in _host_ids or joined is None or joined not in _host_ids or not is_split:
        return _host_ids.get(documents)
    first = (documents.storage_offset() - joined.storage_offset()) // joined.stride(0)
    return _host_ids[joined][first : first + len(documents)]


def concat_documents(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the document ids of microbatches along the batch dim, with their `host_document_ids`."""
    joined = torch.cat(tuple(parts))
    on_host = [ids for ids in map(host_document_ids, parts) if ids is not None]
    if len(on_host) == len(parts):
        derive_documents(joined, torch.cat(on_host))
    return joined


def document_lengths(documents_BS: Tensor) -> tuple[int, ...]:
    """Return the lengths of the documents, row after row; a document is a run of equal ids in a row.

    Ids without `host_document_ids` are read from the device.
    """
    on_host = host_document_ids(documents_BS)
    rows = (documents_BS if on_host is None else on_host).cpu().numpy()
    ends = [np.flatnonzero(np.diff(row, append=row[-1] + 1)) + 1 for row in rows]
    return tuple(int(length) for row in ends for length in np.diff(row, prepend=0))


DocumentLengths = Callable[[Tensor], tuple[int, ...]]
"""Takes document ids [B, S]; returns the lengths of the documents, as `document_lengths` does."""


def documents_by_row(documents_BS: Tensor, lengths: DocumentLengths) -> tuple[tuple[int, ...], ...]:
    """Return the lengths of the documents of each row."""
    found: list[list[int]] = []
    room = 0
    for length in lengths(documents_BS):
        if not room:
            found.append([])
            room = documents_BS.shape[1]
        found[-1].append(length)
        room -= length
    return tuple(map(tuple, found))
