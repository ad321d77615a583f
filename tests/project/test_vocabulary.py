"""Terms of the glossary are found by a search in code and docs; retired words are gone from names."""

from __future__ import annotations

import ast
import re

import pytest
from paths import ROOT

PACKAGE = ROOT / "megalaunch"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
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
    "forgetting", "patience", "trade", "dealt", "laid", "speaks", "happening", "sieve", "trainee", "trip", "guilty",
}  # fmt: skip


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


@pytest.mark.parametrize("path", re.findall(rf"`((?:{ROOMS})/[\w/.]*)`", GLOSSARY))
def test_the_glossary_names_files_that_exist(path):
    assert (PACKAGE / path).exists(), path


def test_the_glossary_names_keys_that_exist():
    from megalaunch.config.keys import schema_keys
    from megalaunch.config.schema import RunSpec

    sections = set(RunSpec.__dataclass_fields__)
    keys = set(re.findall(r"`(\w+\.[\w.]+?)(?:=\w+|\.\*)?`", GLOSSARY))
    named = {key for key in keys if key.split(".")[0] in sections}
    assert len(named) > 20
    known = set(schema_keys()) | sections
    assert not {key for key in named if key not in known and not any(k.startswith(f"{key}.") for k in known)}
