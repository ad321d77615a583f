"""The documentation site: it builds without a warning, lists every page, and names keys and messages that exist."""

from __future__ import annotations

import re
import subprocess

import pytest
from paths import ROOT

from megalaunch.config.keys import SECTIONS, schema_keys

SITE = (ROOT / "scripts/site/mkdocs.yml").read_text()
GUIDES = sorted((ROOT / "docs").glob("migrate-*.md"))
CODE = "\n".join(path.read_text() for path in sorted((ROOT / "megalaunch").rglob("*.py")))
TROUBLES = re.findall(r"^### `([^`]+)`", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)


def test_the_navigation_lists_every_page_once():
    listed = re.findall(r": (docs/\S+\.md)$", SITE, re.MULTILINE)
    pages = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted(pages)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_a_migration_page_names_keys_that_exist(guide):
    rows = re.findall(r"^\| `.*?\| (.*) \|$", guide.read_text(), re.MULTILINE)
    assert len(rows) > 20
    known = set(schema_keys())
    for row in rows:
        for key in re.findall(r"`([a-z_]+\.[a-z_.0-9]+)(?:=\w+)?`", row):
            assert key in known or key.split(".")[0] not in SECTIONS, key


@pytest.mark.parametrize("message", TROUBLES)
def test_a_message_of_troubleshooting_is_printed_by_the_code(message):
    assert message in CODE


def test_there_are_guides_and_messages():
    assert len(GUIDES) == 6
    assert len(TROUBLES) >= 15


@pytest.mark.slow  # its tools are installed first, with pip
def test_the_site_is_built_without_a_warning():
    """A lost link, a lost anchor or a page outside the navigation is an error of scripts/docs."""
    done = subprocess.run([ROOT / "scripts/docs"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stdout.lower()
    assert (ROOT / "build/site/docs/faq.html").is_file()
