"""Patch engine and torch methods so that each reports its phase to a `PhaseTracker`, simulated or real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.utils.checkpoint import checkpoint

from megalaunch.engine.parallel import activation_checkpoint
from megalaunch.engine.simulate.patch import patch
from megalaunch.engine.simulate.phase_tracker import Phase, PhaseTracker

# Methods of a pipeline stage that belong to its backward pass, also outside of autograd.
_BACKWARD = ("backward_one_chunk", "backward_weight_one_chunk", "perform_reduce_grad")
_TRAVELS: dict[str, Phase] = {
    "get_fwd_recv_ops": "forward",
    "get_fwd_send_ops": "forward",
    "get_bwd_recv_ops": "backward",
    "get_bwd_send_ops": "backward",
}


@contextmanager
def phase_hooks(moment: PhaseTracker) -> Iterator[None]:
    """Within the context, models that are built and steps that are run report their phases to `moment`."""
    again = partial(checkpoint, context_fn=lambda: (moment.phase_scope(moment.phase), moment.phase_scope("recompute")))
    with ExitStack() as replacements:
        replacements.enter_context(patch(activation_checkpoint, "checkpoint", again))
        # The first step of a schedule runs a microbatch only to infer shapes.
        _patch_phase(replacements, moment, _PipelineSchedule, "_initialize_pp_stages", "preparing")
        for name in _BACKWARD:
            _patch_phase(replacements, moment, PipelineStage, name, "backward")
        for name, phase in _TRAVELS.items():
            own = getattr(PipelineStage, name)
            replacements.enter_context(patch(PipelineStage, name, _patch_p2p_phase(moment, own, phase)))
        yield


def _patch_phase(replacements: ExitStack, moment: PhaseTracker, owner: type, name: str, phase: Phase) -> None:
    own = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        with moment.phase_scope(phase):
            return own(*args, **kwargs)

    replacements.enter_context(patch(owner, name, method))


def _patch_p2p_phase(moment: PhaseTracker, own: Callable[..., Any], phase: Phase) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        operations = own(*args, **kwargs)
        for operation in operations:
            moment.tag_p2p(operation.tensor, phase)
        return operations

    return method
