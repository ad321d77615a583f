"""Run the steps of the Dockerfile in root file systems of their own (chroot), as `docker build` and `docker run` would.

Standard library only. Reads the instructions that our Dockerfile uses; any other one is an error, so that a proof by
this script is one of the file itself.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build/container"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Arguments: the root, then pairs (host path, path in the root) up to `--`, then what chroot runs. In a mount namespace
# of its own, so that nothing stays mounted.
ENTER = """
set -e
root="$1"; shift
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
while [ "$1" != -- ]; do
    if [ -d "$1" ]; then mkdir -p "$root$2"; else mkdir -p "$(dirname "$root$2")"; touch "$root$2"; fi
    mount --bind "$1" "$root$2"; shift 2
done
shift
exec chroot "$@"
"""


class BuildError(Exception):
    """A step failed, or the Dockerfile has something that this script does not know."""


@dataclass
class Stage:
    """A stage: its root file system, and what its instructions have set so far."""

    name: str
    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    folder: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Host:
    """What the steps get from this machine: variables by name, and files or folders at the same paths."""

    variables: Sequence[str]
    binds: Sequence[tuple[str, str]]


def read_instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a Dockerfile: the keyword and the rest, continuation lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        keyword, _, rest = line.strip().partition(" ")
        if keyword:
            yield keyword.upper(), rest.strip()


def substitute(text: str, values: dict[str, str]) -> str:
    """Replace $NAME and ${NAME}; another form is an error outside of RUN, whose shell knows them all."""
    if re.search(r"\$\{\w+[^\w}]", text):
        raise BuildError(f"only ${{NAME}} is known here: {text}")
    return re.sub(r"\$\{?(\w+)\}?", lambda match: values.get(match[1], ""), text)


def assignments(text: str) -> list[tuple[str, str]]:
    """Return the pairs of `NAME=VALUE NAME=VALUE`."""
    pairs = [word.partition("=") for word in shlex.split(text)]
    return [(name, value) for name, _, value in pairs]


def stage_name(rest: str, before: str) -> str:
    """Return the name of a stage from what follows FROM; one without a name is called after the one before."""
    words = rest.split()
    return words[2] if len(words) == 3 and words[1].upper() == "AS" else f"after_{before}"


def needed_stages(instructions: Sequence[tuple[str, str]], target: str | None) -> set[str]:
    """Return the target and the stages from which it comes or copies, as BuildKit does. Raises BuildError."""
    uses: dict[str, set[str]] = {}
    name = ""
    for keyword, rest in instructions:
        if keyword == "FROM":
            name = stage_name(rest, name)
            uses[name] = {rest.split()[0]}
        elif keyword == "COPY":
            uses[name] |= set(re.findall(r"--from=(\S+)", rest))
    if target is not None and target not in uses:
        raise BuildError(f"the Dockerfile has no stage {target}")
    needed, found = set[str](), {target or name}
    while found:
        needed |= found
        found = {used for stage in found for used in uses[stage] if used in uses} - needed
    return needed


class Build:
    """Builds the stages in order, as docker build does without its cache."""

    def __init__(self, base: Path, given: dict[str, str], host: Host, target: str | None) -> None:
        self.base, self.given, self.host, self.target = base, given, host, target
        self.stages: list[Stage] = []
        self.globals: dict[str, str] = {}

    def run(self, dockerfile: str) -> Stage:
        """Run the instructions of the target (default: the last stage) and of the stages that it needs; returns it."""
        instructions = list(read_instructions(dockerfile))
        needed, current = needed_stages(instructions, self.target), ""
        for keyword, rest in instructions:
            if keyword == "FROM":
                current = stage_name(rest, current)
            step = getattr(self, f"_{keyword.lower()}", None)
            if step is None:
                raise BuildError(f"{keyword} is not known to scripts/container.py")
            if not current or current in needed:
                print(f"--- {keyword} {rest}", flush=True)
                step(rest)
        return self.stages[-1]

    def execute(self, command: Sequence[str], folder: str | None = None, user: str | None = None) -> None:
        """Run a command in the newest stage; raises BuildError."""
        stage = self.stages[-1]
        account = find_account(stage.root, user or stage.user)
        kept = {name: os.environ[name] for name in self.host.variables if name in os.environ}
        environment = {"HOME": account.pw_dir, **kept, **stage.arguments, **stage.environment}
        binds = [part for pair in self.host.binds for part in pair]
        inside = ["/usr/bin/env", "-i", *(f"{name}={value}" for name, value in environment.items())]
        inside += ["/bin/sh", "-c", 'cd "$0" && exec "$@"', folder or stage.folder, *command]
        owner = f"--userspec={account.pw_uid}:{account.pw_gid}"
        entered = ["sh", "-c", ENTER, "enter", str(stage.root), *binds, "--", owner, str(stage.root), *inside]
        code = subprocess.run(["unshare", "--mount", "--fork", "--kill-child", *entered]).returncode
        if code:
            raise BuildError(f"{shlex.join(command)} ended with exit status {code}")

    def _from(self, rest: str) -> None:
        source = substitute(rest.split()[0], self.globals)
        name = stage_name(rest, self.stages[-1].name if self.stages else "")
        earlier = next((stage for stage in self.stages if stage.name == source), None)
        root = FOLDER / name
        shutil.rmtree(root, ignore_errors=True)
        subprocess.run(
            ["cp", "-a", "--reflink=auto", str(earlier.root if earlier else self.base), str(root)], check=True
        )
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
        self.stages.append(Stage(name, root, **({"environment": dict(earlier.environment)} if earlier else {})))

    def _arg(self, rest: str) -> None:
        name, _, default = rest.partition("=")
        values = self.stages[-1].arguments if self.stages else self.globals
        values[name] = self.given.get(name, default or self.globals.get(name, ""))

    def _env(self, rest: str) -> None:
        stage = self.stages[-1]
        values = stage.arguments | stage.environment
        stage.environment |= {name: substitute(value, values) for name, value in assignments(rest)}

    def _run(self, rest: str) -> None:
        if rest.startswith(("--", "[", "<<")):
            raise BuildError(f"RUN takes a shell command here: {rest}")
        self.execute(["/bin/sh", "-c", rest])

    def _copy(self, rest: str) -> None:
        *sources, target = [word for word in rest.split() if not word.startswith("--")]
        options = dict(word[2:].split("=", 1) for word in rest.split() if word.startswith("--"))
        if set(options) - {"from"}:
            raise BuildError(f"COPY takes only --from here: {rest}")
        destination = self.stages[-1].root / target.lstrip("/")
        for source in sources:
            if "from" in options:
                origin = next(stage.root for stage in self.stages if stage.name == options["from"])
                ignore = None
            else:
                origin, ignore = ROOT, ignored_names(ROOT, (ROOT / ".dockerignore").read_text())
            path = origin / source.lstrip("/")
            if ignore is not None and path.name in ignore(str(path.parent), [path.name]):
                raise BuildError(f"COPY {source}: .dockerignore excludes it")
            if path.is_dir():
                shutil.copytree(path, destination, symlinks=True, ignore=ignore, dirs_exist_ok=True)
            else:
                into = destination / path.name if target.endswith("/") else destination
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, into)

    def _user(self, rest: str) -> None:
        self.stages[-1].user = substitute(rest, self.stages[-1].arguments)

    def _workdir(self, rest: str) -> None:
        self.stages[-1].folder = rest
        (self.stages[-1].root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _healthcheck(self, rest: str) -> None:
        self.stages[-1].health = json.loads(rest.partition("CMD")[2])

    def _entrypoint(self, rest: str) -> None:
        self.stages[-1].entrypoint = json.loads(rest)

    def _cmd(self, rest: str) -> None:
        self.stages[-1].command = json.loads(rest)

    def _label(self, rest: str) -> None:
        assignments(rest)

    def _stopsignal(self, rest: str) -> None:
        if not rest.startswith("SIG"):
            raise BuildError(f"STOPSIGNAL {rest} is no signal")


def find_account(root: Path, user: str) -> pwd.struct_passwd:
    """Return the account of a user of a root file system, by name. Raises BuildError."""
    for line in (root / "etc/passwd").read_text().splitlines():
        name, password, uid, gid, gecos, home, shell = line.split(":")
        if name == user:
            return pwd.struct_passwd((name, password, int(uid), int(gid), gecos, home, shell))
    raise BuildError(f"USER {user} does not exist")


def ignored_names(context: Path, text: str):  # noqa: ANN201  # a callback of shutil.copytree
    """Return the filter of a .dockerignore for shutil.copytree: the last pattern that matches decides."""
    patterns = [line for line in text.splitlines() if line and not line.startswith("#")]

    def matches(path: str, pattern: str) -> bool:
        parts = path.split("/")
        if pattern.startswith("**/"):
            return any(fnmatch.fnmatch(part, pattern[3:]) for part in parts)
        depth = pattern.count("/") + 1
        return fnmatch.fnmatch("/".join(parts[:depth]), pattern) and len(parts) >= depth

    def excluded(path: str) -> bool:
        found = False
        for pattern in patterns:
            if matches(path, pattern.removeprefix("!")):
                found = not pattern.startswith("!")
        return found

    def ignore(folder: str, names: list[str]) -> set[str]:
        above = Path(folder).relative_to(context)
        return {name for name in names if excluded((above / name).as_posix())}

    return ignore


def install_base(suite: str) -> Path:
    """Return a minimal Debian under build/container, installed by debootstrap the first time."""
    base = FOLDER / f"debian-{suite}"
    if not (base / "etc/debian_version").exists():
        if shutil.which("debootstrap") is None:
            raise BuildError("debootstrap is not installed (Debian, Ubuntu: apt install debootstrap), or name a --base")
        subprocess.run(["debootstrap", "--variant=minbase", suite, str(base)], check=True)
    return base


def main() -> None:
    """Build, check the health, run the command."""
    parser = argparse.ArgumentParser(prog="scripts/container", description=__doc__)
    parser.add_argument("--base", type=Path, help="a root file system instead of debootstrap's; it is copied")
    parser.add_argument("--suite", default="bookworm", help="what debootstrap installs")
    parser.add_argument("--target", help="the last stage to build")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--env", action="append", default=[], metavar="NAME", help="a variable of this machine to keep")
    parser.add_argument("--bind", action="append", default=[], metavar="PATH[:PATH]", help="a file or folder to mount")
    parser.add_argument("command", nargs="*", help="arguments for the entrypoint (default: CMD)")
    options = parser.parse_args()
    if os.geteuid():
        sys.exit("error: chroot and mounts need root: use sudo scripts/container")
    binds = [(left, right or left) for left, _, right in (bind.partition(":") for bind in options.bind)]
    build = Build(Path(), dict(assignments(shlex.join(options.build_arg))), Host(options.env, binds), options.target)
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        build.base = options.base or install_base(options.suite)
        stage = build.run((ROOT / "Dockerfile").read_text())
        if stage.health:
            print(f"--- health check: {shlex.join(stage.health)}", flush=True)
            build.execute(stage.health)
        command = [*stage.entrypoint, *(options.command or stage.command)]
        if command:
            print(f"--- as {stage.user}: {shlex.join(command)}", flush=True)
            build.execute(command)
    except BuildError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
