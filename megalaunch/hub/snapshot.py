"""Download what a name on the Hugging Face Hub stands for, or find it in the cache that huggingface_hub keeps.

The client reads its settings from the environment: HF_HOME (cache), HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from glob import has_magic
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from megalaunch.hub.name import HubError, HubName
from megalaunch.installation import install_command

Part = Literal["commit", "config", "weights", "data"]
"""What is downloaded: nothing, configuration and tokenizer files, these and the weights, or all files."""

_TEXTS = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.bpe")
_PATTERNS: dict[Part, tuple[str, ...]] = {"commit": (), "config": _TEXTS, "weights": (*_TEXTS, "*.safetensors")}


@dataclass(frozen=True)
class Snapshot:
    """Files of one commit in the cache.

    Attributes:
        name: the name with the commit as its revision.
        path: the folder of the repository, or the path in it that the name gives; it may be a glob or a prefix.
    """

    name: HubName
    path: Path


@cache
def fetch(name: HubName, part: Part) -> Snapshot:
    """Download the part of a repository that is not in the cache yet.

    Without a network the cache is used: the commit that the revision had when it was last downloaded.

    Raises:
        HubError: the files are neither in the cache nor to be had; `fix` says what to do.
    """
    if find_spec("huggingface_hub") is None:
        raise HubError(f"{name} needs huggingface_hub, which is not installed", install_command("megalaunch[hub]"))
    allowed, ignored = _select(name, part)
    with _quietly(), _as_hub_errors(name):
        from huggingface_hub import snapshot_download

        root = Path(
            snapshot_download(
                name.repo,
                repo_type=name.kind,
                revision=name.revision,
                allow_patterns=allowed,
                ignore_patterns=ignored,
            )
        )
    path = root / name.path if name.path else root
    if part != "commit" and not has_magic(name.path) and not _exists(path):
        cause = f"{name}: the repository has no such file or folder"
        raise HubError(cause, f"look it up at {_page(name)}/tree/{name.revision or 'main'}")
    return Snapshot(name.pin(root.name), path)


def _select(name: HubName, part: Part) -> tuple[list[str] | None, list[str]]:
    """Return patterns of files to download (None: all), and of files to ignore."""
    hidden = [".*", "*/.*"]
    if part == "data":
        if not name.path:
            return None, hidden
        return [name.path, f"{name.path}/*", f"{name.path}.bin", f"{name.path}.idx"], hidden
    folder = f"{name.path}/" if name.path else ""
    allowed = [f"{folder}{pattern}" for pattern in _PATTERNS[part]]
    if name.path and part != "commit":
        allowed.append(name.path)
    return allowed, [f"{folder}*/*"]  # variants of the model in subfolders


def _exists(path: Path) -> bool:
    """Return whether a file or folder exists, or the token files of a prefix."""
    return path.exists() or path.with_name(f"{path.name}.bin").exists()


@contextmanager
def _quietly() -> Iterator[None]:
    """Show progress on terminals only; keep the client's own warnings out of the output."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _as_hub_errors(name: HubName) -> Iterator[None]:
    """Explain the client's errors. Their own text is left out: it may hold an address with credentials."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        cause = f"{name} is gated, and this token, or none, has no access"
        raise HubError(cause, f"accept its terms at {_page(name)}, then {_TOKEN}") from error
    except errors.RepositoryNotFoundError as error:
        cause = f"there is no {name.kind} repository {name.repo} on {_endpoint()}, or it is private"
        raise HubError(cause, f"correct the name; for a private one {_TOKEN}") from error
    except errors.RevisionNotFoundError as error:
        cause = f"{name.repo} has no revision {name.revision or 'main'}"
        raise HubError(cause, f"name a branch, a tag or a full commit hash of {_page(name)}/commits") from error
    except errors.LocalEntryNotFoundError as error:
        raise _unreachable(name) from error
    except errors.HFValidationError as error:
        raise HubError(f"{name}: the Hub allows no such name", "correct it: hf://ORG/NAME") from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise HubError(f"{_endpoint()} refuses access to {name} (HTTP {status})", _TOKEN) from error
        raise HubError(f"{_endpoint()} answered HTTP {status} for {name}", "try again later") from error
    except OSError as error:
        if error.errno is None:  # the client's own connection errors
            raise _unreachable(name) from error
        cause = f"{name} cannot be stored in {_cache()}: {error.strerror}"
        raise HubError(cause, "set HF_HOME to another disk") from error


_TOKEN = "set HF_TOKEN, or run `hf auth login`"


def _unreachable(name: HubName) -> HubError:
    from huggingface_hub import constants

    kind = "" if name.kind == "model" else " --repo-type dataset"
    if constants.HF_HUB_OFFLINE:
        return HubError(
            f"{name} is not, or not completely, in the cache {_cache()}, and HF_HUB_OFFLINE forbids downloads",
            "unset HF_HUB_OFFLINE, or set HF_HOME to the cache that has it",
        )
    return HubError(
        f"{_endpoint()} cannot be reached, and {name} is not, or not completely, in the cache {_cache()}",
        f"run `hf download {name.repo}{kind}` where there is a network and set HF_HOME to its cache, or give a folder",
    )


def _endpoint() -> str:
    """Return the address of the Hub without credentials."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}"


def _page(name: HubName) -> str:
    return f"{_endpoint()}/{'datasets/' if name.kind == 'dataset' else ''}{name.repo}"


def _cache() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)
