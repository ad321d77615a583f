"""Access to the stores behind URLs through fsspec: which file system, what is refused, and attempts after failures.

Credentials come from where the store's own client finds them (environment, configuration files). A URL that holds one
is refused, since URLs are in process lists, logs and reports.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from megalaunch.data.errors import DataError
from megalaunch.installation import install_command

ATTEMPTS = 4
_FIRST_WAIT = 0.5  # seconds before the second attempt; each later wait is twice as long
WEB = ("http", "https")
# Their part before an @ is no credential but names a container or a user.
_NAMED_BEFORE_HOST = ("abfs", "abfss", "wasb", "wasbs", "sftp", "ssh", "hdfs", "webhdfs", "smb")
_SECRET_PARAMETER = re.compile(r"sig|signature|token|secret|password|credential|key", re.IGNORECASE)
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("abfs", "abfss", "az", "adl"), "adlfs"),
    **dict.fromkeys(WEB, "aiohttp"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
}
_CREDENTIALS = {
    **dict.fromkeys(
        ("s3", "s3a"),
        "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket FSSPEC_S3_ANON=true.",
    ),
    **dict.fromkeys(
        ("gs", "gcs"),
        "Run gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS; for a public bucket "
        "FSSPEC_GS_TOKEN=anon.",
    ),
}
_ETAGS = ("ETag", "etag", "md5Hash", "Content-MD5", "content_md5", "Digest", "blob_id")
_TIMES = ("generation", "Last-Modified", "LastModified", "last_modified", "updated", "mtime", "created")
T = TypeVar("T")


@dataclass(frozen=True)
class RemoteStatus:
    """State of a file: bytes, the store's hash of its content ("" if it has none), and what changes when it does."""

    size: int
    etag: str
    version: str


def is_remote(source: str) -> bool:
    """Return whether an input is a URL and no path."""
    return "://" in source


def scheme_of(url: str) -> str:
    """Return the part of a URL before `://`, in lower case."""
    return url.partition("://")[0].lower()


def refuse_credentials(url: str) -> None:
    """Raise DataError, without the secret, for a URL that holds a password, a key or a signature."""
    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    user, at, host = authority.rpartition("@")
    fix = "Leave it out, and give credentials by the environment or the configuration file of the store's own client."
    if "::" in scheme:
        raise DataError("chained URLs are not read", file=f"{scheme}://...", fix="Give the URL after the last ::.")
    if at and (":" in user or scheme.lower() not in _NAMED_BEFORE_HOST):
        shown = f"{scheme}://***@{host}{slash}{path.partition('?')[0]}"
        raise DataError("the URL holds a credential, which others see in process lists", file=shown, fix=fix)
    address, _, query = url.partition("?")
    if any(_SECRET_PARAMETER.search(name) for name, _ in parse_qsl(query, keep_blank_values=True)):
        raise DataError("the URL is signed or holds a credential", file=f"{address}?***", fix=fix)


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it. DataError if a package for it is missing."""
    scheme = scheme_of(url)
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        fix = f"{install_command('megalaunch[data]')} brings it."
        raise DataError("reading it needs the package fsspec", file=url, fix=fix) from None
    try:
        system, path = url_to_fs(url)
    except ImportError:
        package = _PACKAGES.get(scheme, f"of fsspec for {scheme}://")
        fix = f"{install_command(package)} brings it." if scheme in _PACKAGES else ""
        raise DataError(f"reading it needs the package {package}", file=url, fix=fix) from None
    except ValueError:
        cause = f"{scheme}:// is not a kind of store that fsspec knows"
        raise DataError(cause, file=url, fix="Give s3://, gs://, hf://, https:// or a path.") from None
    return system, str(path)


def status_of(info: dict[str, Any]) -> RemoteStatus | None:
    """Return the state that a store reports for a file; None if its size is missing."""
    if info.get("size") is None:
        return None
    etag = next((str(info[key]).strip('"') for key in _ETAGS if info.get(key)), "")
    time = next((str(info[key]) for key in _TIMES if info.get(key)), "")
    return RemoteStatus(int(info["size"]), etag, etag or time)


def with_retries(url: str, action: str, attempt: Callable[[], T], stop: Event | None = None) -> T:
    """Return the result of an access to a store, which is tried `ATTEMPTS` times where trying again may help.

    Args:
        url: what is accessed.
        action: in words, after "cannot".
        attempt: makes the access.
        stop: ends the waiting between two attempts.

    Raises:
        DataError: the access is refused, or no attempt succeeded.
    """
    stop = stop or Event()
    for number in range(1, ATTEMPTS + 1):
        try:
            return attempt()
        except DataError:
            raise
        except Exception as error:  # each client raises errors of its own
            reason = _reason(error)
            _refuse_for_good(url, reason)
            if number == ATTEMPTS or stop.wait(_FIRST_WAIT * 2 ** (number - 1)):
                cause = f"cannot {action} after {number} attempts ({_words(reason)})"
                fix = "Check the network and the store's address, then run the same again."
                raise DataError(cause, file=url, fix=fix) from None
    raise AssertionError("the last attempt returns or raises")


def _reason(error: BaseException) -> BaseException:
    """Return the error behind fsspec's: of a web server it reports every failure as a missing file."""
    cause = error.__cause__
    of_network = cause is not None and (isinstance(cause, OSError) or type(cause).__module__.startswith("aiohttp"))
    return cause if cause is not None and of_network and isinstance(error, FileNotFoundError) else error


def _refuse_for_good(url: str, error: BaseException) -> None:
    """Raise DataError for an answer that another attempt would not change."""
    status = getattr(error, "status", None) or getattr(error, "code", None)
    if isinstance(error, FileNotFoundError) or status in (404, "404", 410):
        raise DataError("there is no such file or folder", file=url, fix="Correct the URL.") from None
    if (
        isinstance(error, PermissionError)
        or status in (401, "401", 403, "403")
        or "Credentials" in type(error).__name__
    ):
        fix = _CREDENTIALS.get(scheme_of(url), "Give credentials by the environment of the store's own client.")
        raise DataError(f"access is refused ({_words(error)})", file=url, fix=fix) from None
    if isinstance(error, ValueError) and ("range request" in str(error) or "Cannot seek" in str(error)):
        cause = "the server sends a file only as a whole (no range requests)"
        raise DataError(cause, file=url, fix="Download it, and give the file.") from None


def _words(error: BaseException) -> str:
    """Return the first line of an error, with its type."""
    text = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
