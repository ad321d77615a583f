"""scripts/sbom: the fields that CycloneDX 1.6 requires, and every distribution of the environment."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from importlib.metadata import PathDistribution, distributions, version

from paths import ROOT

SPEC = importlib.util.spec_from_file_location("sbom", ROOT / "scripts/sbom.py")
sbom = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sbom)


def made(folder, name, *lines, record=""):
    """A distribution with this metadata."""
    info = folder / f"{name}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.4", f"Name: {name}", *lines, ""]))
    if record is not None:
        (info / "RECORD").write_text(record)
    return PathDistribution(info)


def test_the_document_of_this_environment_is_complete_and_has_what_the_format_requires():
    document = sbom.bill_of_materials(distributions())
    assert (document["bomFormat"], document["specVersion"], document["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(
        r"urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", document["serialNumber"]
    )
    components = [document["metadata"]["component"], *document["components"]]
    for component in components:
        assert component["type"] == "library"
        assert component["name"]
        assert component["version"]
        licences = component.get("licenses", [])
        kinds = [*map(list, licences)]  # one expression, or any number of names
        assert kinds in ([["expression"]], [["license"]] * len(licences))
        assert all([*licence.get("license", {"name": ""})] == ["name"] for licence in licences)
    references = {component["bom-ref"] for component in components}
    assert len(references) == len(components)
    assert {entry["ref"] for entry in document["dependencies"]} == references
    assert {one for entry in document["dependencies"] for one in entry["dependsOn"]} <= references
    installed = {sbom.normalized(found.name) for found in distributions()}
    assert {component["name"]: component["version"] for component in components} == {
        name: version(name) for name in installed
    }
    assert {"megalaunch", "hydra-core", "omegaconf"} <= installed


def test_licences_hashes_and_requirements_come_from_the_metadata(tmp_path):
    found = [
        made(tmp_path, "A_b.c", "Version: 1.0+cpu", "License-Expression: MIT", "Requires-Dist: D>=1; extra == 'x'"),
        made(tmp_path, "d", "Version: 2", "License: " + 90 * "long", "Requires-Dist: absent", record=None),
        made(tmp_path, "e", "Version: 3", "Classifier: License :: OSI Approved :: BSD License", record="e.py,,\n"),
        made(tmp_path, "f", "Version: 4", "License: Apache 2.0"),
    ]
    document = sbom.bill_of_materials(found)
    assert document == sbom.bill_of_materials([*reversed(found), made(tmp_path, "F", "Version: 5")])
    a, d, e, f = document["components"]
    assert (a["name"], a["purl"]) == ("a-b-c", "pkg:pypi/a-b-c@1.0%2Bcpu")
    assert [one.get("licenses") for one in (a, d, e, f)] == [
        [{"expression": "MIT"}],
        None,
        [{"license": {"name": "BSD License"}}],
        [{"license": {"name": "Apache 2.0"}}],
    ]
    assert "properties" not in d
    digest = hashlib.sha256(b"e.py,,\n").hexdigest()
    assert e["properties"] == [{"name": "megalaunch:RECORD:sha256", "value": digest}]
    needs = {entry["ref"]: entry["dependsOn"] for entry in document["dependencies"]}
    assert (needs[a["bom-ref"]], needs[d["bom-ref"]]) == ([d["bom-ref"]], [])
