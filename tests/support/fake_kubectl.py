"""A stand-in for kubectl and its cluster: objects are JSON files of a folder, and errors are those that a test sets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_PROGRAM = """#!{python}
import sys
sys.path.insert(0, {support!r})
from fake_kubectl import answer
sys.exit(answer({folder!r}, sys.argv[1:]))
"""


class FakeKubectl:
    """The program in `folder/bin`, and the objects of its cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        program = self.bin / "kubectl"
        program.write_text(
            _PROGRAM.format(python=sys.executable, support=str(Path(__file__).parent), folder=str(folder))
        )
        program.chmod(0o755)

    def refuse(self, verb: str, message: str) -> None:
        """Let a verb (`create`, `create --dry-run=server`) fail with a message."""
        (self.folder / "refusals.json").write_text(json.dumps({verb: message}))

    def read(self, name: str) -> dict[str, Any] | None:
        """The object `kind/name`; None if there is none."""
        try:
            return json.loads((self.folder / f"{name.replace('/', '_')}.json").read_text())
        except FileNotFoundError:  # or removed since its name was listed
            return None

    def write(self, name: str, found: dict[str, Any]) -> dict[str, Any]:
        """Create or replace an object, and return it; readers see all of it."""
        path = self.folder / f"{name.replace('/', '_')}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(found))
        new.replace(path)
        return found

    def is_deleted(self, name: str) -> bool:
        """Whether an object is gone, as pods are with their job."""
        return True

    def remove(self, name: str) -> None:
        """Delete an object, if it is there."""
        (self.folder / f"{name.replace('/', '_')}.json").unlink(missing_ok=True)

    def names(self, kind: str) -> list[str]:
        """The names of all objects of a kind."""
        return sorted(path.stem.partition("_")[2] for path in self.folder.glob(f"{kind}_*.json"))

    def log(self, pod: str) -> Path:
        """What `kubectl logs POD` prints."""
        return self.folder / f"{pod}.log"

    @property
    def calls(self) -> list[list[str]]:
        """The commands so far, without the options that all have."""
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def answer(folder: str, words: list[str]) -> int:
    """Do what kubectl does; return its exit code."""
    import yaml

    cluster = object.__new__(FakeKubectl)
    cluster.folder = Path(folder)
    with (cluster.folder / "calls.jsonl").open("a") as calls:
        print(json.dumps(words), file=calls)
    namespace = next((word.partition("=")[2] for word in words if word.startswith("--namespace=")), "default")
    words = [word for word in words if not word.startswith(("--namespace=", "--context=", "--request-timeout="))]
    options = dict(word.partition("=")[::2] for word in words if word.startswith("--"))
    verb, *names = [word for word in words if not word.startswith("--")]
    refusals = cluster.folder / "refusals.json"
    told = json.loads(refusals.read_text()) if refusals.exists() else {}
    dry = "--dry-run" in options
    refused = told.get(f"{verb} --dry-run=server" if dry else verb)
    if refused is not None:
        print(refused, file=sys.stderr)
        return 1
    if verb == "config":
        print("mini")
    elif verb == "create" and not dry:
        for number, found in enumerate(yaml.safe_load_all(Path(options["--filename"]).read_text())):
            found["metadata"] |= {"namespace": namespace, "uid": f"uid-{number}"}
            cluster.write(f"{found['kind'].lower()}/{found['metadata']['name']}", found)
    elif verb == "get" and names == ["pods"]:
        print(json.dumps({"items": _selected(cluster, options)}))
    elif verb == "delete" and names == ["pods"]:
        for pod in _selected(cluster, options):
            cluster.remove(f"pod/{pod['metadata']['name']}")
    elif verb == "logs":
        if not cluster.log(names[0]).exists():
            print("Error from server (BadRequest): container is waiting to start", file=sys.stderr)
            return 1
        sys.stdout.write(cluster.log(names[0]).read_text())
    elif verb in ("get", "patch", "delete"):
        return _one(cluster, verb, names, options)
    return 0


def _one(cluster: FakeKubectl, verb: str, names: list[str], options: dict[str, str]) -> int:
    if verb == "delete" and not names:
        return 0
    found = cluster.read(names[0])
    if found is None:
        if "--ignore-not-found" in options:
            return 0
        kind, _, name = names[0].partition("/")
        print(f'Error from server (NotFound): {kind}s "{name}" not found', file=sys.stderr)
        return 1
    if verb == "get":
        print(json.dumps(found))
    elif verb == "delete":
        (cluster.folder / f"{names[0].replace('/', '_')}.json").unlink()
    else:
        found["metadata"] |= json.loads(options["--patch"])["metadata"]
        cluster.write(names[0], found)
    return 0


def _selected(cluster: FakeKubectl, options: dict[str, str]) -> list[dict[str, Any]]:
    label, _, value = options["--selector"].partition("=")
    pods = [cluster.read(f"pod/{name}") for name in cluster.names("pod")]
    return [pod for pod in pods if pod and pod["metadata"]["labels"].get(label) == value]
