"""What the engine can run today, as data. Shown by `megalaunch doctor`; this table only shrinks.

Every other value of these keys composes, validates and plans; `train` refuses it by the rule engine.unsupported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megalaunch.config.schema import RunSpec
from megalaunch.config.schema.paths import value_at


@dataclass(frozen=True)
class Limit:
    """A key of which the engine runs the `supported` values only; `meaning` says what the others would be.

    Of a list every item is held to them. `idle` is another key and its value with which this one means nothing.
    """

    path: str
    supported: tuple[Any, ...]
    meaning: str
    idle: tuple[str, Any] | None = None

    @property
    def others(self) -> str:
        """What the other values are, and where they do not matter: for tables and messages."""
        if self.idle is None:
            return self.meaning
        key, value = self.idle
        return f"{self.meaning}; no limit while {key} is {value}"

    def allows(self, spec: RunSpec) -> bool:
        """True when the engine runs the spec's value of this key."""
        value = value_at(spec, self.path)
        if value in self.supported or (self.idle is not None and value_at(spec, self.idle[0]) == self.idle[1]):
            return True
        return isinstance(value, tuple) and value != () and all(item in self.supported for item in value)


LIMITS = (
    Limit("model.moe.num_experts", (None,), "mixture of experts"),
    Limit("model.mla.kv_lora_rank", (None,), "latent attention"),
    Limit("model.mtp.num_layers", (0,), "multi-token prediction"),
    Limit("parallel.ep", (1,), "expert parallelism"),
    Limit("parallel.etp", (None, 1), "tensor parallelism inside experts"),
    Limit("precision.compute", ("auto", "fp32", "bf16"), "fp16 and fp8"),
    Limit("precision.gradients", ("fp32",), "gradients kept in bf16"),
    Limit("precision.moments", ("fp32",), "moments in bf16"),
    Limit("precision.master", ("fp32",), "weights without an fp32 copy"),
    Limit(
        "recompute.modules",
        ("attention", "norm", "mlp", "activation"),
        "recomputing parts of experts and of latent attention",
    ),
    Limit("optimizer.name", ("adamw",), "other optimizers"),
    Limit("optimizer.embedding_lr", (None,), "a rate of its own for embedding and head"),
    Limit("optimizer.skip_above_norm", (None,), "skipping steps of a large gradient"),
    Limit("optimizer.offload_fraction", (0.0,), "optimizer states in host memory"),
    Limit("schedule.warmup_init_lr", (0.0,), "a warm-up that starts above 0"),
    Limit("batch.ramp", (None,), "batches that grow"),
)


def unsupported(spec: RunSpec) -> Iterator[tuple[Limit, Any]]:
    """Every limit that the spec goes beyond, with its value."""
    for limit in LIMITS:
        if not limit.allows(spec):
            yield limit, value_at(spec, limit.path)
