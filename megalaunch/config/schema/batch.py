"""The `batch` section: how many tokens one step sees."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """microbatches a step = global_batch_size / (micro_batch_size * dp)."""

    sequence_length: int = setting(meaning="Tokens of one sample.", unit="tokens", minimum=1)
    micro_batch_size: int | None = setting(
        1,
        "Samples a device computes at once; null: its whole share, of which a pipeline gets one a stage.",
        "samples",
        minimum=1,
    )
    global_batch_size: int = setting(meaning="Samples of one optimizer step, over all devices.", minimum=1)
    rampup_batch_size: str | None = setting(
        None, "Smaller batches first, as `TOKENS:SAMPLES` from 0 on, the last being global_batch_size: `0:512 2B:1024`."
    )
