"""Rendezvous credentials of the agents on several machines: a run id and a shared secret."""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from megalaunch.fs import PRIVATE_MODE, open_file, write_file_atomically

_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Credentials:
    """Credentials of one run directory. They appear in no argument list, environment or log."""

    run_id: str
    secret: str


class CredentialsError(Exception):
    """The credentials file is missing or invalid."""


def keep_credentials(path: Path) -> None:
    """Write new random credentials, readable only by the user, unless valid ones exist."""
    try:
        read_credentials(path)
    except CredentialsError:
        renew_credentials(path)


def renew_credentials(path: Path) -> None:
    """Write new random credentials, readable only by the user. Raises OSError."""
    content = asdict(Credentials(secrets.token_hex(32), secrets.token_hex(32)))
    write_file_atomically(path, json.dumps(content), PRIVATE_MODE)


def read_credentials(path: Path) -> Credentials:
    """Read the credentials. Raises CredentialsError."""
    try:
        with os.fdopen(open_file(path, os.O_RDONLY), encoding="utf-8") as file:
            credentials = Credentials(**json.load(file))
    except FileNotFoundError:
        raise CredentialsError(
            f"{path} is missing: `megalaunch train ... --prepare-only` writes it next to spec.yaml, for every machine"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise CredentialsError(f"{path} cannot be read: {error}") from error
    if not all(isinstance(part, str) and _HEX.fullmatch(part) for part in (credentials.run_id, credentials.secret)):
        raise CredentialsError(f"{path} has no valid rendezvous credentials")
    return credentials


def prove(secret: str, *parts: str) -> str:
    """Return the HMAC-SHA256 (RFC 2104) of these parts: that its sender holds the secret, which it does not tell."""
    return hmac.new(bytes.fromhex(secret), json.dumps(parts).encode(), "sha256").hexdigest()
