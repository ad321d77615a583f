"""The reference pages are what the code says; every finding that can be printed has its place there."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from reference_pages import PAGES, ROOT
from slow_cases import slow_but
from svg_drawing import WIDTH

import megalaunch
from megalaunch.plan.findings import OUTSIDE_RULES, REFERENCE, rule_anchor
from megalaunch.plan.rules.registry import RULES

QUICK = [name for name in PAGES if name != "docs/reference/recipes.md"]  # which composes every recipe


@pytest.mark.parametrize("name", slow_but(PAGES, *QUICK))
def test_a_page_is_not_stale(name):
    written = (ROOT / name).read_text(encoding="utf-8")
    assert written == PAGES[name](), f"{name} is stale: run scripts/reference"


PICTURES = [name for name in PAGES if name.endswith(".svg")]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_loads_nothing(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not re.search(r"@import|@font-face|url\((?!#)|href=\"(?!#)|<script", text)


@pytest.mark.parametrize("name", [name for name in PICTURES if PAGES[name].__module__ == "axis_pictures"])
def test_a_picture_is_small_and_its_words_stay_inside(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert len(text.encode()) < 30_000
    for words in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text"):
        kind = words.get("class", "")
        size = 8 if "tiny" in kind else 10 if "small" in kind else 12
        assert "middle" in kind or "end" in kind or float(words.get("x")) + 0.53 * size * len(words.text) <= WIDTH


def test_every_finding_has_an_anchor():
    text = (ROOT / REFERENCE).read_text(encoding="utf-8")
    anchors = re.findall(r'<a id="([^"]+)"></a>', text)
    assert len(anchors) == len(set(anchors))
    assert set(anchors) == {rule_anchor(rule) for rule in (*RULES, *OUTSIDE_RULES)}
    assert set(re.findall(r"\(#([^)]+)\)", text)) == set(anchors)


def test_findings_outside_the_rules_are_listed():
    text = "\n".join(path.read_text(encoding="utf-8") for path in Path(megalaunch.__file__).parent.rglob("*.py"))
    constants = dict(re.findall(r"^([A-Z_]+) = \"([a-z_.]+)\"$", text, re.MULTILINE))
    found = re.findall(r"\bFinding\(\s*(?:\"([a-z_.]+)\"|([A-Z_]+)\b)", text)
    made = {rule or constants[name] for rule, name in found}
    assert made - set(RULES) == set(OUTSIDE_RULES)
    assert not set(RULES) & set(OUTSIDE_RULES)
