"""The bytes of a remote file: blocks are fetched in ranges, ahead if they are read in order, and again on failures."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from io import SEEK_CUR, SEEK_SET, RawIOBase
from typing import Any

from megalaunch.data.remote_store import with_retries

_BLOCK = 1 << 22  # bytes of a request: its latency of some 50 ms is small beside the transfer
_AHEAD = 4  # requests at a time, as one connection to an object store reaches a fraction of a network's speed
_KEPT = 2 * _AHEAD  # blocks in memory
_ONE_AT_A_TIME = threading.Lock()  # for file systems that are not made for several threads (memory://)


class RemoteReader(RawIOBase):
    """A seekable raw file over a URL; wrap it in a BufferedReader.

    Args:
        url: of the file.
        size: its bytes.
        system, path: the file system of fsspec, and the file's path in it.
    """

    def __init__(self, url: str, size: int, system: Any, path: str) -> None:
        super().__init__()
        self._url, self._size, self._system, self._path = url, size, system, path
        self._position, self._last = 0, -1  # the last is the block that was read last
        self._blocks: OrderedDict[int, Future[bytes]] = OrderedDict()
        self._stop = threading.Event()
        self._opened = threading.local()  # a file of fsspec for each thread, as each has one position
        self._threads = ThreadPoolExecutor(_AHEAD if self._system.async_impl else 1)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        """Set and return the position."""
        start = 0 if whence == SEEK_SET else self._position if whence == SEEK_CUR else self._size
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read up to the end of a block into a buffer; return the number of bytes, 0 at the end. Raises DataError."""
        if self._position >= self._size:
            return 0
        number, offset = divmod(self._position, _BLOCK)
        content = memoryview(self._block(number))[offset : offset + len(buffer)]
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _block(self, number: int) -> bytes:
        ahead = _AHEAD if number == self._last + 1 and number else 1
        last = (self._size - 1) // _BLOCK
        for wanted in range(number, min(number + ahead, last + 1)):
            if wanted not in self._blocks:
                self._blocks[wanted] = self._threads.submit(self._fetch, wanted)
        self._blocks.move_to_end(number)
        while len(self._blocks) > _KEPT:
            self._blocks.popitem(last=False)[1].cancel()
        self._last = number
        try:
            return self._blocks[number].result()
        except BaseException:
            self._blocks.pop(number)
            raise

    def _fetch(self, number: int) -> bytes:
        start = number * _BLOCK
        end = min(start + _BLOCK, self._size)
        return with_retries(self._url, "read it", lambda: self._read(start, end), self._stop)

    def _read(self, start: int, end: int) -> bytes:
        if not self._system.async_impl:
            with _ONE_AT_A_TIME:
                return self._read_range(start, end)
        return self._read_range(start, end)

    def _read_range(self, start: int, end: int) -> bytes:
        try:
            if getattr(self._opened, "file", None) is None:
                self._opened.file = self._system.open(self._path, "rb", cache_type="none")
            self._opened.file.seek(start)
            content: bytes = self._opened.file.read(end - start)
        except BaseException:
            self._opened.file = None
            raise
        if len(content) != end - start:
            self._opened.file = None
            raise ConnectionError(f"{len(content):,} bytes came instead of {end - start:,}")
        return content

    def close(self) -> None:
        """Drop all blocks; requests under way end in the background."""
        if not self.closed:
            self._stop.set()
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._blocks.clear()
        super().close()
