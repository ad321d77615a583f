"""The rule that a run fits into device memory, by the memory model of this engine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from megalaunch.plan.findings import Severity
from megalaunch.plan.memory import Memory, predict_memory
from megalaunch.plan.memory.fit import MANY_STAGES, TIGHT
from megalaunch.plan.memory.loss_chunks import count_loss_chunks, microbatch_tokens
from megalaunch.plan.resolve import derive
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import suggestions_enabled
from megalaunch.schema import RunSpec, SpecError, with_values

_CANDIDATES = 12
_CHUNK = 1024
"""Tokens per chunk that a fix proposes: enough for the head's matmul to run at full speed."""
_GB = 1e9
_SELECTIVE: dict[str, Any] = {"recompute.granularity": "selective", "recompute.modules": ("norm", "activation")}
_FULL: dict[str, Any] = {
    "recompute.granularity": "full",
    "recompute.method": "uniform",
    "recompute.num_layers": 1,
    "recompute.modules": ("attention",),  # the default: full recomputation has no modules
}


@rule("memory.fits", "Weights, gradients, optimizer states, activations and logits fit into device memory.")
def fits(at: RuleContext) -> Iterator[Violation]:
    """Out of memory is the most frequent failure of a new layout; the memory model describes this engine."""
    chip = at.chip
    if chip is None or chip.device == "cpu" or chip.memory_bytes is None:
        return
    memory = peak_memory(at)
    if memory is None or memory.total <= TIGHT * chip.memory_bytes:
        return
    severity: Severity = "error" if memory.total > chip.memory_bytes else "warning"
    of_size = f"{chip.memory_bytes / _GB:.1f} GB"
    parts = ", ".join(f"{kind} {size / _GB:.1f}" for kind, size in memory.kinds.items() if size >= 0.05 * _GB)
    where = f"pp rank {memory.rank}" if at.spec.parallel.pp > 1 else "a rank"
    tail = "" if severity == "error" else ", which leaves little for libraries and fragmentation"
    yield Violation(
        "batch.micro_batch_size",
        f"{where} needs {memory.total / _GB:.1f} GB of the {of_size} of {chip.name}{tail}: {parts}",
        {"bytes": round(memory.total), "device_bytes": chip.memory_bytes, "rank": memory.rank, **_rounded(memory)},
        tuple(islice(smaller(at, TIGHT * chip.memory_bytes), _CANDIDATES)) if suggestions_enabled() else (),
        severity,
    )


def _rounded(memory: Memory) -> dict[str, int]:
    return {kind: round(size) for kind, size in memory.kinds.items()}


def peak_memory(at: RuleContext) -> Memory | None:
    """Return the memory of the device that needs most; None if another rule reports why it is unknown."""
    if at.spec.parallel.pp * at.chunks > MANY_STAGES or at.stage_violations or at.microbatches is None:
        return None
    return _predict(at.spec)


def _predict(spec: RunSpec) -> Memory | None:
    try:
        return predict_memory(spec)
    except (ValueError, OverflowError):  # open or indivisible values, and sizes beyond every float
        return None


def smaller(at: RuleContext, limit: float) -> Iterator[Fix]:
    """Yield candidate fixes whose predicted memory is at most `limit`, the fastest first."""
    for fix in _candidates(at.spec):
        try:
            changed, _ = derive(with_values(at.spec, {"parallel.dp": None, **fix}))
        except SpecError:
            continue
        memory = _predict(changed)
        if memory is not None and memory.total <= limit:
            yield fix


def _chunked(spec: RunSpec) -> dict[str, Any]:
    """Return the fix of smaller chunks for head and loss, at almost no cost; empty if they are as small already."""
    chunks = microbatch_tokens(spec) // _CHUNK
    return {"train.loss_chunks": chunks} if chunks > count_loss_chunks(spec) else {}


def _candidates(spec: RunSpec) -> Iterator[Fix]:
    p, batch = spec.parallel, spec.batch
    smaller: list[dict[str, Any]] = [{}]
    if p.data_sharding != "optim_grads_params":
        smaller.append({"parallel.data_sharding": "optim_grads_params"})
    if spec.precision.compute_dtype == "fp32":
        smaller.append({"precision.compute_dtype": "bf16"})
    micro = batch.micro_batch_size or 1
    chunked = _chunked(spec)
    if chunked:
        yield chunked
    wider = [n for n in (2 * p.tp, 4 * p.tp, 8 * p.tp) if n <= 8]
    deeper = [n for n in (2 * p.pp, 4 * p.pp, 8 * p.pp) if n <= spec.model.num_layers]
    again: list[dict[str, Any]] = [{}, *([_SELECTIVE] if spec.recompute.granularity == "none" else [])]
    again += [_FULL] if spec.recompute.granularity != "full" else []
    layouts: list[dict[str, Any]] = [{}, *([chunked] if chunked else [])]
    layouts += [{"batch.micro_batch_size": n} for n in sorted({max(1, micro // 2), 1}, reverse=True) if n < micro]
    if p.tp > 1 and not p.sequence_parallel:
        layouts.insert(1, {"parallel.sequence_parallel": True})
    same_degrees = len(layouts)
    layouts += [{"parallel.tp": n, "parallel.sequence_parallel": True} for n in wider]
    layouts += [{"parallel.pp": n} for n in deeper]
    layouts += [{"parallel.tp": 8, "parallel.sequence_parallel": True, "parallel.pp": n} for n in deeper if p.tp < 8]
    for number, layout in enumerate(layouts):
        for recomputed in again:
            for sharding in smaller if number < same_degrees else smaller[:1]:
                if recomputed or sharding or layout not in ({}, chunked):
                    yield {**layout, **recomputed, **sharding}
