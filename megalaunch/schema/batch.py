"""The `batch` section: tokens of an optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """Batch sizes: microbatches per step = global_batch_size / (micro_batch_size * dp)."""

    sequence_length: int = setting(meaning="Tokens per sample.", unit="tokens", minimum=1)
    micro_batch_size: int | None = setting(
        1,
        "Samples per microbatch; null: global_batch_size / dp, or with pp the most that give each stage a microbatch.",
        "samples",
        minimum=1,
    )
    max_micro_batch_size: int | None = setting(
        None, "Largest micro_batch_size that is derived where it is null; null: no limit.", "samples", minimum=1
    )
    global_batch_size: int = setting(meaning="Samples per optimizer step, over all data-parallel ranks.", minimum=1)
    rampup_batch_size: str | None = setting(
        None,
        "Batch size rampup up to global_batch_size, as `TOKENS:SAMPLES` pairs from 0 tokens on (`0:512 2B:1024`) or as "
        "Megatron's `START INCREMENT SAMPLES` (`16 16 5859375`).",
    )
