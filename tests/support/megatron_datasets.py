"""megatron-core's GPT datasets on token files of ours: the outside reference of sample order, blends and masks."""

from __future__ import annotations

import contextlib
import io
import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core", reason="megatron-core is not installed (pip install megalaunch[parity])")
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

EOD = 0


def megatron_splits(
    sizes: list[int | None],
    sequence_length: int,
    seed: int,
    blend: tuple[list[str], list[float] | None] | None = None,
    split: str | None = None,
    per_split: list[tuple[list[str], list[float] | None] | None] | None = None,
    **flags: bool,
) -> list:
    """Its training, validation and test sets of the given sizes (None: one epoch)."""
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        blend=blend,
        blend_per_split=per_split,
        split=split,
        path_to_cache=None,  # beside the files; a folder of its own would need a process group
        tokenizer=SimpleNamespace(eod=EOD, pad=-1, vocab_size=4000, unique_identifiers={"class": "none"}),
        **{"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False, **flags},
    )
    with contextlib.redirect_stdout(io.StringIO()):
        return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


def tokens_of(sample: dict) -> list[int]:
    """The S + 1 tokens of one of its samples."""
    return [*sample["tokens"].tolist(), int(sample["labels"][-1])]
