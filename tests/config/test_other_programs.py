"""Test that settings in the spelling of other programs are answered with our keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megalaunch.config.keys import is_section, schema_keys
from megalaunch.config.other_programs import OTHER_FORM, SAME_VALUE, SECTION_NAMES
from megalaunch.config.unknown_names import unknown_key
from tests.support.paths import ROOT

PAGES = sorted((ROOT / "docs").glob("migrate-*.md"))
NAME = re.compile(r"[a-z_0-9]+(\.[a-z_0-9]+)*")
NO_SETTINGS = {
    "accelerator.log",
    "train_dataloader",
    "data_efficiency",
    "curriculum_learning",
    "type",
}  # functions, topics
CODE = re.compile(r"`([^`]+)`")


def documented(page: Path) -> list[tuple[str, list[str]]]:
    """Return the settings of a page's tables, each with the keys that the page names for it."""
    found: list[tuple[str, list[str]]] = []
    for line in page.read_text(encoding="utf-8").splitlines():
        if not line.startswith("| `"):
            continue
        theirs, ours = (
            [re.split("[=:]", part)[0] for part in CODE.findall(cell)] for cell in line[2:].split(" | ")[:2]
        )
        keys = [part for part in ours if part in schema_keys() or is_section(part)]
        if keys and all(NAME.fullmatch(part) for part in theirs):
            each = [[key] for key in keys] if len(keys) == len(theirs) else [keys] * len(theirs)
            found += zip(theirs, each, strict=True)
    return [
        (name, keys) for name, keys in found if name not in NO_SETTINGS | schema_keys().keys() and not is_section(name)
    ]


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_every_setting_of_a_migration_page_is_answered_with_its_key(page: Path):
    rows = documented(page)
    wrong = {name: unknown_key(name) for name, keys in rows if not any(key in unknown_key(name) for key in keys)}
    assert not wrong
    assert len(rows) > 5


SPELLINGS = {
    "seq_len": "batch.sequence_length",
    "optimizer.learning_rate": "optimizer.lr",
    "sequence_parallel": "parallel.sequence_parallel",
    "training.seed": "train.seed",
    "trainer.num_nodes": "cluster.nodes",
    "model.num_attention_head": "model.num_attention_heads",
    "model.n_heads": "model.num_attention_heads",
    "optim.name": "optimizer.name",
    "name": "run.name",
    "output_dir": "run.directory",
    "checkpoint.load": "checkpoint.load_pretrained",
    "wandb.project": "logging.tracker_project",
    "zero_stage": "parallel.data_sharding",
    "initialize_from": "checkpoint.load_pretrained",
    "checkpoint.save_every": "checkpoint.interval",
    "dtype": "precision.compute_dtype",
    "precision.dtype": "precision.compute_dtype",
    "model.attention": "model.attention_backend",
    "data.tokenizer": "tokenizer.path",
    "validation.freq": "train.validation_interval",
    "optim.lr_scheduler.constant_steps": "schedule.decay_steps",
    "trainer.strategy.context_parallel_size": "parallel.cp",
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_common_spelling_is_answered_with_the_key(name: str):
    named = re.findall(r"[a-z]+\.[a-z_.]+[a-z]", unknown_key(name).partition("; ")[2])
    assert named[0] == SPELLINGS[name]


def test_the_tables_name_existing_keys_and_no_key_of_ours():
    assert set(SAME_VALUE.values()) <= set(schema_keys())
    assert not (SAME_VALUE.keys() | OTHER_FORM.keys()) & set(schema_keys())
    assert not SAME_VALUE.keys() & OTHER_FORM.keys()
    assert all(is_section(section) for section in SECTION_NAMES.values())
    named = {key for text in OTHER_FORM.values() for key in re.findall(r"\b[a-z]+\.[a-z_.]+[a-z]\b", text)}
    assert named <= set(schema_keys())
