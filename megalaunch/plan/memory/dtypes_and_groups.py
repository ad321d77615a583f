"""The dtypes and degrees of a spec that the memory of its layers depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megalaunch.plan.attention_choice import TakenBackend, taken_backends
from megalaunch.plan.layers import Layer
from megalaunch.plan.topology import most_common_cp_comm_type
from megalaunch.schema import RunSpec
from megalaunch.schema.parallel import ContextCommType
from megalaunch.schema.recompute import RecomputeModule


@dataclass(frozen=True)
class DtypesAndGroups:
    """Dtypes and parallel degrees: what a layer's memory depends on besides the model.

    `micro_batch_size` is 1 where nothing depends on it, so that layouts share the bytes of a layer. `window_backend` is
    the attention backend of layers with a sliding window.
    """

    tp: int
    etp: int
    ep: int
    sequence_parallel: bool
    compute_dtype: str
    emulates_fp8: bool
    fp8_wgrad: bool
    residual_dtype: str
    recompute_modules: tuple[RecomputeModule, ...]
    sequence_length: int
    micro_batch_size: int
    cp: int
    cp_comm_type: ContextCommType
    reset_attention_mask: bool
    dynamic_cp: bool
    moe_load_imbalance: float
    rows_are_sent: bool
    attention_backend: TakenBackend
    window_backend: TakenBackend

    @classmethod
    def from_spec(cls, spec: RunSpec) -> DtypesAndGroups:
        """Return those of a resolved spec."""
        p, recompute = spec.parallel, spec.recompute
        dynamic_cp = p.dynamic_context_parallel and p.cp > 1
        precision = spec.precision
        counts_rows = dynamic_cp or spec.model.sliding_window is not None or precision.emulates_fp8
        backends = taken_backends(spec)
        return cls(
            tp=p.tp,
            etp=p.etp or 1,
            ep=p.ep,
            sequence_parallel=bool(p.sequence_parallel),
            compute_dtype=precision.compute_dtype,
            emulates_fp8=precision.emulates_fp8,
            fp8_wgrad=precision.fp8.wgrad,
            residual_dtype=precision.residual_dtype,
            recompute_modules=recompute.modules if recompute.granularity == "selective" else (),
            sequence_length=spec.batch.sequence_length,
            micro_batch_size=(spec.batch.micro_batch_size or 1) if counts_rows else 1,
            cp=p.cp,
            cp_comm_type=most_common_cp_comm_type(p),
            reset_attention_mask=spec.data.reset_attention_mask,
            dynamic_cp=dynamic_cp,
            moe_load_imbalance=p.moe_load_imbalance,
            rows_are_sent=p.moe_token_dispatcher_type == "alltoall",
            attention_backend=backends.full,
            window_backend=backends.of(spec.model.sliding_window),
        )

    def of_layer(self, kind: Layer) -> DtypesAndGroups:
        """Return those of a layer, with its attention backend."""
        return self if kind.window is None else replace(self, attention_backend=self.window_backend)


def dtype_bytes(compute_dtype: str) -> int:
    """Return the bytes of an activation; with fp8 activations have 16 bits."""
    return 4 if compute_dtype == "fp32" else 2
