"""A search for a term finds code and docs; names, pages and help use no retired word."""

from __future__ import annotations

import ast
import re

import pytest
from paths import ROOT

from megalaunch.cli.app import COMMANDS, load_command

PACKAGE = ROOT / "megalaunch"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# docs/dev/decisions.md quotes what was measured and decided at its time.
DEV_PAGES = [ROOT / f"docs/dev/{name}.md" for name in ("README", "measurements", "tests")]
GENERATED_PAGES = [ROOT / f"docs/reference/{name}.md" for name in ("commands", "configuration", "recipes", "rules")]
PROSE = [*PAGES, ROOT / "CONTRIBUTING.md", *DEV_PAGES, *GENERATED_PAGES]
CODE = "\n".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))
DOCS = "\n".join(path.read_text() for path in PAGES)
GLOSSARY = (ROOT / "docs/glossary.md").read_text()
ROOMS = "engine|data|plan|launch|config|conf|rundir|runs|kernels"

# One search each, as a newcomer would type it; case aside, a space may be a hyphen or an underscore.
TERMS = (
    "KV cache", "gradient accumulation", "loss mask", "activation checkpoint", "position ids", "all-gather",
    "reduce-scatter", "all-reduce", "all-to-all", "data parallel", "tensor parallel", "sequence parallel",
    "context parallel", "pipeline parallel", "expert parallel", "ring attention", "Ulysses", "zero bubble", "1F1B",
    "microbatch", "activation offload", "loss scal", "master weights", "flash attention", "grouped-query",
    "attention mask", "sliding window", "softcap", "RoPE", "RMSNorm", "SwiGLU", "cross-entropy", "indexed dataset",
    "shuffle index", "fill-in-the-middle", "chat template", "FSDP", "HSDP", "ZeRO", "MFU", "rendezvous",
    "elastic agent", "flight recorder", "override", "config group", "warmup", "weight decay", "rampup",
    "token dispatcher",
    "column parallel", "row parallel", "tied embedding", "pipeline schedule", "async save", "device mesh",
)  # fmt: skip

# Home-made words that named something for which the field has a term (docs/glossary.md).
RETIRED = {
    "sight", "sights", "trail", "trails", "witness", "verdict", "ballot", "elected", "accusation", "suspect", "doubt",
    "forgetting", "trade", "dealt", "laid", "speaks", "happening", "sieve", "trainee", "trip", "guilty",
}  # fmt: skip


# Retired phrases of prose, and what to write instead.
PHRASES = {
    r"(?<!post-)(?<!pre-)processors?": "CPU",
    r"exchang(?:e|es|ed|ing)": "the collective's name",
    r"deals?|dealt": "partition",
    r"sights?": "attention mask",
    r"trails?": "collective trace, flight recorder",
    r"witness(?:es)?|verdicts?|ballots?|accusations?|guilty": "hang diagnostics, vote",
    r"laid out|lies? (?:on|in|over|within|there)": "sharded, stored, distributed",
    r"anew|made again": "again, recomputed",
    r"beside": "next to; overlapped with; asynchronously",
    r"words?": "override, argument, option",
    r"gaps?": "bubble, launch overhead",
    r"held to": "compared with, limited to",
    r"what is": "a noun",
    r"told|tells|hears?|heard|speaks?": "prints, reports, receives",
    r"travel(?:s|led)?": "is sent",
    r"go(?:es)? on": "continue, resume",
    r"out of step": "collective mismatch",
    r"still at it": "still running",
    r"made-up": "mock, random",
    r"shared out": "split",
    r"runs? backwards": "backward",
    r"(?:narrow|wide)r? format": "dtype",
    r"whole square": "non-causal attention",
    r"fullest": "peak",
}  # fmt: skip
# What contains such a word in its ordinary sense.
ALLOWED = (
    "retired words",
    "retired word",
    "caches every word",
    "word cache",
    "word table",
    "what is learned",
)


def _retired_phrases(text: str) -> list[str]:
    """The retired phrases of a text with their surroundings, without those of blocks of code and of code in a line."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub("|".join(ALLOWED), "", " ".join(text.split()), flags=re.IGNORECASE)
    return [
        f"{text[max(0, match.start() - 40) : match.end() + 40]!r}: say {instead}"
        for phrase, instead in PHRASES.items()
        for match in re.finditer(rf"\b(?:{phrase})\b", text, re.IGNORECASE)
    ]


def _found(term: str, text: str) -> bool:
    return re.search(re.escape(term).replace(r"\ ", "[ _-]").replace(r"\-", "[ _-]"), text, re.IGNORECASE) is not None


def _names() -> dict[str, list[str]]:
    """Every name that the package defines, and the files that define it."""
    names: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        names.setdefault(path.stem, []).append(str(path.relative_to(ROOT)))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                name = node.name
            elif isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = node.attr
            else:
                continue
            names.setdefault(name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return names


def _words(name: str) -> set[str]:
    """The words of a snake_case or CamelCase name."""
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))


@pytest.mark.parametrize("term", TERMS)
def test_a_search_for_a_term_finds_code_and_docs(term):
    assert _found(term, CODE), f"no file of megalaunch/ says {term!r}"
    assert _found(term, DOCS), f"no page says {term!r}"


def test_no_name_uses_a_retired_word():
    wrong = {name: places for name, places in _names().items() if _words(name) & RETIRED}
    assert not wrong, wrong


def test_a_retired_word_is_seen_in_any_spelling():
    assert _words("AttentionSight") & RETIRED
    assert _words("write_trail") & RETIRED
    assert not _words("insight") & RETIRED


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_no_page_uses_a_retired_phrase(page):
    wrong = _retired_phrases(page.read_text())
    assert not wrong, "\n".join(wrong)


def _help_texts(name: str) -> str:
    """What `megalaunch NAME --help` prints of a command, its options and its subcommands."""
    texts, commands = [COMMANDS[name].help], [load_command(name)]
    while commands:
        command = commands.pop()
        texts += [command.help or "", *(getattr(option, "help", None) or "" for option in command.params)]
        commands += getattr(command, "commands", {}).values()
    return "\n\n".join(texts)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_help_uses_a_retired_phrase(name):
    wrong = _retired_phrases(_help_texts(name))
    assert not wrong, "\n".join(wrong)


def test_a_retired_phrase_is_seen_over_lines_and_not_in_code():
    assert _retired_phrases("The ranks go\non as before.") == ["'The ranks go on as before.': say continue, resume"]
    assert not _retired_phrases("The post-processor of `beside`.\n\n```text\nout of step\n```\n")


@pytest.mark.parametrize("path", re.findall(rf"`((?:{ROOMS})/[\w/.]*)`", GLOSSARY))
def test_the_glossary_names_files_that_exist(path):
    assert (PACKAGE / path).exists(), path


def test_the_glossary_names_keys_that_exist():
    from megalaunch.config.keys import schema_keys
    from megalaunch.schema import RunSpec

    sections = set(RunSpec.__dataclass_fields__)
    keys = set(re.findall(r"`(\w+\.[\w.]+?)(?:=\w+|\.\*)?`", GLOSSARY))
    named = {key for key in keys if key.split(".")[0] in sections}
    assert len(named) > 20
    known = set(schema_keys()) | sections
    assert not {key for key in named if key not in known and not any(k.startswith(f"{key}.") for k in known)}
