"""ssh as a script of our own: what hosts say, and how ssh ends there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from megalaunch.launchers.attached.remote_agent import greeting

# `ssh -G` tells the address of a host; without it, what a host says and how ssh ends there.
_SSH = """#!/bin/sh
case "$*" in *" -G "*|"-G "*) echo "hostname 10.0.0.1"; exit 0;; esac
{answer}
"""

UNREACHED = "echo connect to host: No route to host >&2; exit 255"


def make_ssh(folder: Path) -> Callable[[str], None]:
    """Make a folder of programs with `ssh`, whose hosts do not answer; returns a function that sets what it does."""
    folder.mkdir()

    def answer(line: str) -> None:
        (folder / "ssh").write_text(_SSH.format(answer=line))
        (folder / "ssh").chmod(0o755)

    answer("exit 255")
    return answer


def playing_hosts(code: int) -> str:
    """What ssh does where each command ends at once with this exit code."""
    records = ({"greeting": greeting()}, {"started": 1}, {"exit": code})
    first, *others = [f"echo '{json.dumps(record)}'" for record in records]
    # an order without arguments only checks the host; the words have no "; ", at which tests split them
    checked = """case "$order" in *'"arguments": []'*) echo '{"exit": 0}' && exit;;esac"""
    return f"{first}; read order && {checked}; {'; '.join(others)}"


def on_host(host: str, action: str, others: str) -> str:
    """What ssh does on one host, and on the others."""
    return f'case "$*" in *" {host} "*) {action};; *) {others};; esac'
