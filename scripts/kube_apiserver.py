"""Build a Kubernetes API server from Debian 12's packages, once, into a folder of the user's cache.

No package has kube-apiserver, but the source package of Kubernetes 1.20.2 has its code. apt, with lists and a cache
of its own below that folder, fetches what the build needs and verifies it against the archive's signature; nothing is
installed, and no root is needed. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

RELEASE = "1.20.2"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
SOURCE = "kubernetes=1.20.5+really1.20.2-1.1+deb12u1"
PACKAGES = (
    *("golang-1.19-go", "golang-1.19-src", "golang-github-modern-go-reflect2-dev"),
    *("etcd-server", "kubernetes-client"),
)
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
ARCHIVE = f"""\
Types: deb deb-src
URIs: http://deb.debian.org/debian
Suites: bookworm
Components: main
Signed-By: {KEYRING}
"""
NEEDED_BYTES = 3_000_000_000  # 1.7 GB compiled, 1.0 GB fetched and unpacked; 0.3 GB are kept
MODULE = "k8s.io/kubernetes"
VERSION = f"{MODULE}/vendor/k8s.io/component-base/version"


class BuildError(Exception):
    """A step failed; the text is the line for the user."""


def programs_folder() -> Path:
    """Return the folder of the programs: that of MEGALAUNCH_KUBE, or one of the user's cache."""
    given = os.environ.get("MEGALAUNCH_KUBE")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given).absolute() if given else cache / "megalaunch-kubernetes" / RELEASE


def is_built(folder: Path) -> bool:
    """Return whether a folder has all the programs."""
    return all(os.access(folder / program, os.X_OK) for program in PROGRAMS)


def run(command: Sequence[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    """Run a step in a folder at low priority; return its standard output. Raises BuildError."""
    print(f"--- {' '.join(command[:6])}{' ...' if len(command) > 6 else ''}", file=sys.stderr, flush=True)
    given = {**os.environ, **(environment or {})}
    try:
        done = subprocess.run(["nice", "-n", "10", *command], cwd=folder, env=given, stdout=subprocess.PIPE, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        raise BuildError(f"{command[0]} ended with exit status {done.returncode}")
    return done.stdout


class Apt:
    """apt for the archive above alone, with all its state in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("lists/partial", "cache/archives/partial", "parts", "packages", "root"):
            (folder / name).mkdir(parents=True)
        (folder / "parts/debian.sources").write_text(ARCHIVE)
        (folder / "status").touch()  # of dpkg: nothing is installed, so that nothing of this machine matters
        places = {
            "Dir::Etc::sourcelist": "/dev/null",
            "Dir::Etc::sourceparts": folder / "parts",
            "Dir::State::Lists": folder / "lists",
            "Dir::State::status": folder / "status",
            "Dir::Cache": folder / "cache",
            "APT::Sandbox::User": "",  # the user who builds owns the folder
        }
        self._options = [word for name, value in places.items() for word in ("-o", f"{name}={value}")]

    def fetch(self) -> None:
        """Fetch the packages and the source; apt verifies each file by the signed lists. Raises BuildError."""
        packages = self._folder / "packages"
        run(["apt-get", *self._options, "-q", "update"], packages)
        run(["apt-get", *self._options, "-q", "download", *PACKAGES], packages)
        run(["apt-get", *self._options, "-q", "source", "--download-only", SOURCE], packages)

    def unpack(self) -> tuple[Path, Path]:
        """Return the root of the unpacked packages, and the folder of the source. Raises BuildError."""
        packages, root = self._folder / "packages", self._folder / "root"
        for package in sorted(packages.glob("*.deb")):
            run(["dpkg-deb", "--extract", str(package), str(root)], packages)
        (archive,) = packages.glob("kubernetes_*.orig.tar.gz")
        source = self._folder / "go/src" / MODULE
        source.mkdir(parents=True)
        run(["tar", "--extract", f"--file={archive}", "--strip-components=1"], source)
        return root, source


def mend_source(root: Path, source: Path) -> None:
    """Replace a vendored package that crashes under Go 1.19 (SIGSEGV in mapiternext) by Debian's newer copy."""
    vendored = source / "vendor/github.com/modern-go/reflect2"
    shutil.rmtree(vendored)
    newer = root / "usr/share/gocode/src/github.com/modern-go/reflect2"
    shutil.copytree(newer, vendored, ignore=shutil.ignore_patterns("*_test.go"))


def described_packages(source: Path) -> Iterator[str]:
    """Yield the import paths of the packages whose types are part of the API's description."""
    for top in ("pkg", "cmd", "staging/src/k8s.io"):
        folders = {path.parent for path in (source / top).rglob("*.go") if _is_described(path)}
        for folder in sorted(folders):
            inside = folder.relative_to(source).as_posix()
            vendored = inside.removeprefix("staging/src/")
            yield f"{MODULE}/{inside}" if vendored == inside else f"{MODULE}/vendor/{vendored}"


def _is_described(path: Path) -> bool:
    text = path.read_text(encoding="utf-8", errors="replace")
    return re.search(r"^//\s*\+k8s:openapi-gen=", text, re.MULTILINE) is not None


def build(root: Path, source: Path, work: Path, target: Path) -> None:
    """Compile the programs into `target`. Raises BuildError."""
    go = root / "usr/lib/go-1.19"
    environment = {
        **{"GOROOT": str(go), "GOPATH": str(work / "go"), "GOCACHE": str(work / "compiled"), "GOENV": "off"},
        **{"GOTMPDIR": str(work)},  # nothing is left in /tmp by a build that is killed
        **{"GO111MODULE": "off", "GOPROXY": "off", "CGO_ENABLED": "0", "GOFLAGS": os.environ.get("GOFLAGS", "-p=2")},
    }
    program = str(go / "bin/go")
    generator = work / "openapi-gen"
    run([program, "build", "-o", str(generator), "./vendor/k8s.io/kube-openapi/cmd/openapi-gen"], source, environment)
    # The one generated file that the archive does not have.
    described = [word for package in described_packages(source) for word in ("-i", package)]
    header = source / "vendor/k8s.io/code-generator/hack/boilerplate.go.txt"
    output = ["-O", "zz_generated.openapi", "-p", f"{MODULE}/pkg/generated/openapi", "-r", str(work / "violations.txt")]
    run([str(generator), *output, "--go-header-file", str(header), *described], source, environment)
    major, minor, _ = RELEASE.split(".")
    named = {"gitVersion": f"v{RELEASE}", "gitMajor": major, "gitMinor": minor}
    flags = " ".join(["-s", "-w", *(f"-X {VERSION}.{name}={value}" for name, value in named.items())])
    for name in ("kube-apiserver", "kube-controller-manager"):
        run([program, "build", "-ldflags", flags, "-o", str(target / name), f"./cmd/{name}"], source, environment)
    for name in ("etcd", "kubectl"):
        shutil.copy(root / "usr/bin" / name, target / name)


def check_machine(folder: Path) -> None:
    """Raise BuildError where the build cannot succeed."""
    missing = [program for program in ("apt-get", "dpkg-deb", "tar", "nice") if shutil.which(program) is None]
    if missing:
        raise BuildError(f"{', '.join(missing)} not found: the build needs Debian, or a system with its apt")
    if not KEYRING.exists():
        raise BuildError(f"{KEYRING} is not there: apt install debian-archive-keyring")
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise BuildError(f"{folder} has {free / 1e9:.1f} GB free, and the build needs {NEEDED_BYTES / 1e9:.0f} GB")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder: a second build waits for the first one."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make(folder: Path) -> None:
    """Build the programs into a folder, unless they are there. Raises BuildError."""
    with locked(folder):
        if is_built(folder):
            return
        check_machine(folder)
        work = folder / "build"
        shutil.rmtree(work, ignore_errors=True)  # of a build that was interrupted
        try:
            apt = Apt(work)
            apt.fetch()
            root, source = apt.unpack()
            mend_source(root, source)
            made = work / "programs"
            made.mkdir()
            build(root, source, work, made)
            for program in PROGRAMS:
                (made / program).replace(folder / program)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def main() -> None:
    """Print the folder of the programs, and build them first."""
    parser = argparse.ArgumentParser(prog="scripts/kube_apiserver", description=__doc__)
    parser.add_argument("--path", action="store_true", help="print the folder without building")
    options = parser.parse_args()
    folder = programs_folder()
    try:
        if not options.path:
            make(folder)
    except BuildError as error:
        sys.exit(f"error: {error}")
    print(folder)


if __name__ == "__main__":
    main()
