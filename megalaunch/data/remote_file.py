"""Files of object stores and web servers by URL (`s3://`, `gs://`, `https://`, ...), and their listing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from megalaunch.data.errors import DataError
from megalaunch.data.remote_reader import RemoteReader
from megalaunch.data.remote_store import (
    WEB,
    RemoteStatus,
    file_system,
    refuse_credentials,
    scheme_of,
    status_of,
    with_retries,
)

_BUFFER = 1 << 16


@dataclass(frozen=True)
class RemoteFile:
    """A file by its URL, with the names of pathlib where it is used like a path.

    Attributes:
        url: its URL, without credentials.
        listed: its state when it was listed; None if it is not known yet.
    """

    url: str
    listed: RemoteStatus | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemoteFile:
        return RemoteFile(f"{self.url.rstrip('/')}/{name}")

    @property
    def _path(self) -> PurePosixPath:
        return PurePosixPath(self.url.partition("?")[0] if scheme_of(self.url) in WEB else self.url)

    @property
    def name(self) -> str:
        """The last part of the URL, without a query."""
        return self._path.name

    @property
    def suffix(self) -> str:
        """The suffix of the name."""
        return self._path.suffix

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return self._path.stem

    @property
    def parent(self) -> RemoteFile:
        """The folder."""
        return RemoteFile(self.url.rpartition("/")[0])

    def absolute(self) -> RemoteFile:
        """Return the file itself."""
        return self

    def status(self) -> RemoteStatus:
        """Ask the store for the state of the file now. Raises DataError."""
        system, path = file_system(self.url)

        def ask() -> dict[str, Any]:
            system.invalidate_cache()  # of listings
            found: dict[str, Any] = system.info(path)
            return found

        status = status_of(with_retries(self.url, "read it", ask))
        if status is None:
            raise DataError("the server does not say its size", file=self.url, fix="Download it, and give the file.")
        return status

    def open(self, mode: str = "rb") -> BufferedReader:
        """Open it for reading; parts that are read in order are fetched ahead. Raises DataError, also when reading."""
        size = (self.listed or self.status()).size
        return BufferedReader(RemoteReader(self.url, size, *file_system(self.url)), _BUFFER)

    def read_bytes(self) -> bytes:
        """Return the content. Raises DataError."""
        with self.open() as file:
            return file.read()


InputPath: TypeAlias = Path | RemoteFile


@dataclass(frozen=True)
class RemoteListing:
    """The files of a URL with their names below the folder or the fixed part of a glob, sorted by name.

    Attributes:
        folder: the URL, if it is that of a folder; None for a file or a glob.
        files: (file, name) of each.
    """

    folder: RemoteFile | None
    files: tuple[tuple[RemoteFile, str], ...]


def list_remote(url: str) -> RemoteListing:
    """List a file, the files of a folder, or those that match a glob, without hidden ones.

    Raises:
        DataError: the URL holds a credential, a package is missing, there is no such file, or the store cannot be read.
    """
    refuse_credentials(url)
    system, path = file_system(url)
    if re.search(r"[*\[]" if scheme_of(url) in WEB else r"[*?\[]", path):
        found = with_retries(url, "list it", lambda: system.glob(path, detail=True))
        return RemoteListing(None, _files(system, found, _fixed_part(path), url, "no file matches this glob"))
    info = with_retries(url, "read it", lambda: system.info(path))
    if info.get("type") == "directory" or url.endswith("/"):
        found = with_retries(url, "list it", lambda: system.find(path, detail=True))
        files = _files(system, found, path.rstrip("/"), url, "the folder holds no readable files")
        return RemoteListing(RemoteFile(url.rstrip("/")), files)
    file = RemoteFile(url, status_of(info))
    return RemoteListing(None, ((file, file.name),))


def _files(
    system: Any, found: dict[str, dict[str, Any]], root: str, url: str, nothing: str
) -> tuple[tuple[RemoteFile, str], ...]:
    files = []
    for path, info in found.items():
        name = path.removeprefix(root).strip("/")
        is_hidden = any(part.startswith(".") for part in name.split("/"))
        if info.get("type") != "directory" and not path.endswith("/") and not is_hidden:
            status = status_of(info)
            # The times in a listing may differ in form from those of the file itself.
            listed = status if status is not None and status.etag else None
            files.append((RemoteFile(str(system.unstrip_protocol(path)), listed), name))
    if not files:
        raise DataError(nothing, file=url, fix="Correct the URL; quote a glob, so that the shell leaves it as it is.")
    return tuple(sorted(files, key=lambda file: file[1]))


def _fixed_part(pattern: str) -> str:
    """Return the folders of a glob before its first wildcard."""
    wildcard = re.search(r"[*?\[]", pattern)
    return pattern[: wildcard.start() if wildcard else None].rpartition("/")[0]
