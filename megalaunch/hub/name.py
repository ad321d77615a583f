"""Parse the name of something on the Hugging Face Hub: `hf://[datasets/]ORG/NAME[@REVISION][/PATH]`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

# A path of Python's pathlib has one slash of the two. A revision with slashes is one of the Hub's own references.
_NAME = re.compile(
    r"hf:/{1,2}(?P<kind>datasets/)?(?P<repo>[\w.-]+/[\w.-]+)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[^/@]+|[^/@]+))?(?:/(?P<path>.*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
FORM = "hf://ORG/NAME, hf://ORG/NAME@REVISION or hf://ORG/NAME@REVISION/PATH; datasets may have hf://datasets/..."

Kind = Literal["model", "dataset"]


class HubError(ValueError):
    """A name on the Hub that cannot be used: `cause`, and `fix`, what to do."""

    def __init__(self, cause: str, fix: str) -> None:
        self.cause, self.fix = cause, fix
        super().__init__(f"{cause}\nfix:  {fix}")


@dataclass(frozen=True)
class HubName:
    """A repository of the Hub, its revision (None: the main branch) and a path in it ("": all of it)."""

    kind: Kind
    repo: str
    revision: str | None = None
    path: str = ""

    def __str__(self) -> str:
        prefix = "datasets/" if self.kind == "dataset" else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf://{prefix}{self.repo}{revision}{f'/{self.path}' if self.path else ''}"

    @property
    def commit(self) -> str | None:
        """The revision if it is a full commit hash, which never names other files; else None."""
        return self.revision if self.revision is not None and _COMMIT.fullmatch(self.revision) else None

    def pin(self, commit: str) -> HubName:
        """Return the name with a commit as its revision."""
        return replace(self, revision=commit)


def parse_hub_name(text: str, kind: Kind) -> HubName:
    """Parse a name; `kind` is that of a name without `datasets/`. Raises HubError for another form."""
    found = _NAME.fullmatch(text.strip())
    path = (found["path"] or "").strip("/") if found else ""
    if found is None or any(part in ("", ".", "..") for part in path.split("/") if path):
        raise HubError(f"{text} is not a name on the Hugging Face Hub", f"write {FORM}")
    return HubName("dataset" if found["kind"] else kind, found["repo"], found["revision"], path)


def is_same_source(typed: HubName, pinned: HubName) -> bool:
    """Return whether a typed name may stand for a pinned one: without a revision it does, for the same files."""
    return typed.revision in (None, pinned.revision) and replace(typed, revision=pinned.revision) == pinned
