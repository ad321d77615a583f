"""Who may reach an HTTP server of ours: addresses of the loopback interface, and tokens that are kept in files."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
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


def keep_token(path: Path) -> str:
    """Return the token in a file; the first call makes it, readable only by the user. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), os.fdopen(open_file(path, os.O_RDONLY), encoding="ascii") as file:
        if token := file.read().strip():
            return token
    token = secrets.token_urlsafe(TOKEN_BYTES)
    make_directory(path.parent)
    write_file_atomically(path, token + "\n", PRIVATE_MODE)
    return token
