"""Call kubectl, which has the user's clusters, contexts and logins."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalaunch.launchers.launcher import LauncherError
from megalaunch.schema.kubernetes import KubernetesSpec

_TIMEOUT = 60.0  # seconds
_REQUEST_TIMEOUT = "--request-timeout=30s"
_FIXES = (
    ("connection to the server", "`kubectl get pods` must work here: choose a cluster by launcher.kubernetes.context"),
    ("context was not found", "`kubectl config get-contexts` lists the values of launcher.kubernetes.context"),
    ("does not exist", "`kubectl config get-contexts` lists the values of launcher.kubernetes.context"),
    ("no matches for kind", "install its controller in the cluster, or set launcher.kubernetes.kind=job"),
    ("unknown field", "update the cluster: kind=job needs Kubernetes 1.31, or 1.26 with beta features"),
    (" is invalid: ", "change the setting of launcher.kubernetes that it names: --dry-run prints the manifest"),
    ('namespaces "', "create the namespace, or name another in launcher.kubernetes.namespace"),
    ("Forbidden", "ask for the right to create it, or name another launcher.kubernetes.namespace"),
    ("AlreadyExists", "`kubectl delete` it, or name another run.name"),
)
_PREFIX = re.compile(r"^(error: |Error from server(: | \(\w+\): ))+")  # (Forbidden), (NotFound), ...


class NotFoundError(LauncherError):
    """The cluster does not have the object (any more)."""


def kubectl(options: Sequence[str], *words: str) -> str:
    """Run kubectl; return its standard output.

    Args:
        options: the context and the namespace.

    Raises:
        NotFoundError: the object does not exist.
        LauncherError: it is not installed, fails or does not answer.
    """
    command = ["kubectl", *options, _REQUEST_TIMEOUT, *words]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT)
    except FileNotFoundError:
        raise LauncherError(
            "kubectl is not found on this machine", "install kubectl, and let `kubectl get pods` work"
        ) from None
    except subprocess.TimeoutExpired:
        message = f"kubectl did not answer in {_TIMEOUT:.0f} s"
        raise LauncherError(message, "try again when the cluster answers") from None
    except OSError as error:
        raise LauncherError(f"kubectl does not work: {error}") from error
    if done.returncode != 0:
        raise _failure(done.stderr or done.stdout)
    return done.stdout


def _failure(text: str) -> LauncherError:
    told = [line for line in text.splitlines() if not line.startswith("Warning: ")]  # such as of old kinds
    lines = [_PREFIX.sub("", line).strip() for line in told]
    message = "; ".join(line for line in lines if line) or "failed without a message"
    if "(NotFound)" in text and 'namespaces "' not in message:
        return NotFoundError(f"kubectl: {message}")
    fix = next((fix for words, fix in _FIXES if words in text), "")
    return LauncherError(f"kubectl: {message}", fix)


def read_json(options: Sequence[str], *words: str) -> dict[str, Any]:
    """Run kubectl, and return the object that it prints. Raises LauncherError."""
    text = kubectl(options, *words, "--output=json")
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError:
        raise LauncherError(f"kubectl answered {text[:100]!r} in place of JSON") from None
    return found


def cluster_options(settings: KubernetesSpec) -> list[str]:
    """Return the options of kubectl that name the cluster and the namespace of the settings."""
    given = {"--context": settings.context, "--namespace": settings.namespace}
    return [f"{option}={value}" for option, value in given.items() if value is not None]


def current_context() -> str | None:
    """Return the current context of kubectl; None where there is none, as in a pod."""
    try:
        return kubectl((), "config", "current-context").strip() or None
    except LauncherError as error:
        if "current-context" in str(error):
            return None
        raise


def check_manifest(options: Sequence[str], path: Path) -> None:
    """Let the server check a manifest without creating anything. Raises LauncherError."""
    kubectl(options, "create", "--dry-run=server", f"--filename={path}", "--output=name")


def create_objects(options: Sequence[str], path: Path) -> None:
    """Create the objects of a manifest, or none of them. Raises LauncherError."""
    try:
        kubectl(options, "create", f"--filename={path}", "--output=name")
    except LauncherError as error:
        if "AlreadyExists" not in str(error):
            kubectl(options, "delete", f"--filename={path}", "--ignore-not-found", "--wait=false")
        raise
