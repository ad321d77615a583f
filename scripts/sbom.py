"""Write a software bill of materials: every distribution of this environment, as CycloneDX 1.6 JSON.

Standard library only, and nothing is fetched: versions, licences, requirements and the hash of RECORD (which has the
hashes of all installed files) come from the metadata that pip has written. The same environment gives the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import uuid
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

ROOT_NAME = "megalaunch"
_LICENCE = "License :: "
_LONGEST_NAME = 80  # characters; some packages have the text of the licence where its name belongs


def bill_of_materials(installed: Iterable[Distribution]) -> dict[str, Any]:
    """Return the CycloneDX document of these distributions; the first one of a name counts, as for an import."""
    by_name: dict[str, Distribution] = {}
    for distribution in installed:
        by_name.setdefault(normalized(distribution.name), distribution)
    components = {name: _component(name, by_name[name]) for name in sorted(by_name)}
    references = {name: component["bom-ref"] for name, component in components.items()}
    document: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": components.pop(ROOT_NAME)} if ROOT_NAME in components else {},
        "components": [*components.values()],
        "dependencies": [
            {"ref": reference, "dependsOn": [references[one] for one in _needs(name, by_name)]}
            for name, reference in references.items()
        ],
    }
    number = uuid.UUID(bytes=hashlib.sha256(json.dumps(document).encode()).digest()[:16], version=4)
    return {**document, "serialNumber": f"urn:uuid:{number}"}


def normalized(name: str) -> str:
    """Return a distribution's name as packaging tools compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _component(name: str, distribution: Distribution) -> dict[str, Any]:
    version = distribution.version
    purl = f"pkg:pypi/{name}@{version}".replace("+", "%2B")
    component: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    record = distribution.read_text("RECORD")
    if record is not None:
        digest = hashlib.sha256(record.encode()).hexdigest()
        component["properties"] = [{"name": f"{ROOT_NAME}:RECORD:sha256", "value": digest}]
    return {**component, **_licences(distribution)}


def _licences(distribution: Distribution) -> dict[str, Any]:
    """Return the licence: an SPDX expression, else the names of the classifiers, else a short free text."""
    metadata = distribution.metadata
    if metadata["License-Expression"]:
        return {"licenses": [{"expression": metadata["License-Expression"]}]}
    classifiers = [line for line in metadata.get_all("Classifier") or [] if line.startswith(_LICENCE)]
    names = [line.rpartition(" :: ")[2] for line in classifiers]
    free = (metadata["License"] or "").strip()
    if not names and free and "\n" not in free and len(free) <= _LONGEST_NAME:
        names = [free]
    return {"licenses": [{"license": {"name": name}} for name in names]} if names else {}


def _needs(name: str, by_name: Mapping[str, Distribution]) -> list[str]:
    """Return the names that a distribution requires, extras included, as far as they are installed."""
    found = [re.match(r"[\w.-]+", line) for line in by_name[name].requires or []]
    required = {normalized(match[0]) for match in found if match is not None}
    return sorted(required & by_name.keys() - {name})


def main() -> None:
    """Write the document to a file, or to stdout."""
    parser = argparse.ArgumentParser("scripts/sbom", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, help="the file to write (default: stdout)")
    path = parser.parse_args().file
    text = json.dumps(bill_of_materials(distributions()), indent=2) + "\n"
    if path is None:
        sys.stdout.write(text)
    else:
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
