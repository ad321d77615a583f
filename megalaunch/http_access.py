"""Who may reach an HTTP server of ours: addresses of the loopback interface, and tokens that are kept in files."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import secrets
import shlex
import stat
from pathlib import Path

from megalaunch.fs import PRIVATE_MODE, make_directory, open_file, write_file_atomically

TOKEN_BYTES = 32


def is_loopback(host: str) -> bool:
    """Return whether `host` is an address of the loopback interface, or its name `localhost`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class TokenFileError(Exception):
    """A file whose content cannot be used as a token: the cause and the fix."""


def keep_token(path: Path, private: bool = True) -> str:
    """Return the token in a file; the first call makes it, readable only by the user.

    Args:
        path: The file.
        private: Refuse a token that other users can change.

    Raises:
        OSError: The file cannot be read or made.
        TokenFileError: It holds something else than a token, or is not private.
    """
    with contextlib.suppress(FileNotFoundError), os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        if content := file.read().strip():
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            return _check_token(path, content, mode if private else PRIVATE_MODE)
    token = secrets.token_urlsafe(TOKEN_BYTES)
    make_directory(path.parent)
    write_file_atomically(path, token + "\n", PRIVATE_MODE)
    return token


def _check_token(path: Path, content: bytes, mode: int) -> str:
    if re.fullmatch(rb"[!-~]+", content) is None:  # a client could not send it in a header, or not whole
        raise TokenFileError(
            f"{path} holds no single token: write one line of printable ASCII without spaces, or delete the file for "
            "a new token"
        )
    if mode & (stat.S_IWGRP | stat.S_IWOTH):  # that others read it is the rule where containers are given secrets
        fix = f"chmod 600 {shlex.quote(str(path))}"
        raise TokenFileError(f"{path} can be changed by other users (mode {mode:o}): {fix}")
    return content.decode("ascii")
