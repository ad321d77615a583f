"""What ranks share in a step: the number of tokens, the gradient norm, the loss.

`TrainStep` does all of it, and what belongs to mixtures of experts, fp16 and fp8: a loop of one's own for those calls
`TrainStep`.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.train.dataloader import StepBatch
from megalaunch.engine.train.grads import finalize_grads, local_grad_norm_sq
from megalaunch.engine.train.rank_sync import total_valid_tokens
from megalaunch.schema import RunSpec


def count_tokens(batch: StepBatch, mesh: Mesh) -> tuple[int, ...]:
    """Return the labels with a loss in the global batch: of the decoder, then of each MTP depth. One all-reduce.

    `ForwardBackward.train` divides each loss by them.

    Raises:
        RunEnd: On every rank, if any rank could not read its batch.
    """
    mine = [batch.valid_tokens, *batch.mtp_valid_tokens]
    if not mesh.is_loss_rank:  # tp ranks and pipeline stages read the same samples
        mine = [0] * len(mine)
    return total_valid_tokens(mine, batch.problem, 0, mesh.device)


@torch.no_grad()
def reduce_gradients(spec: RunSpec, mesh: Mesh, model: ModelParts) -> float:
    """Sum the gradients that are still partial over tp and pp, in place; return the norm of all gradients. Collective.

    Those over data-parallel and context-parallel ranks were reduced in the backward pass.

    Raises:
        ValueError: The spec has settings whose steps only `TrainStep` makes.
    """
    _require_plain_step(spec)
    finalize_grads(model, mesh, bool(spec.parallel.sequence_parallel))
    squared_norm = local_grad_norm_sq(model.parameters()).to(mesh.device)
    dist.all_reduce(squared_norm)
    return math.sqrt(squared_norm.item())


def mean_loss(losses: Tensor, mesh: Mesh) -> float:
    """Return the mean token loss of the global batch from what `ForwardBackward.train` returned. One all-reduce."""
    total = losses[:, 0].detach().double().sum() * float(mesh.is_loss_rank)
    dist.all_reduce(total)
    return total.item()


def _require_plain_step(spec: RunSpec) -> None:
    """Refuse settings that a loop of these pieces would leave out without a sign."""
    precision, moe = spec.precision, spec.model.moe
    settings = {
        f"precision.compute_dtype={precision.compute_dtype}": precision.compute_dtype in ("fp16", "fp8"),
        "batch.rampup_batch_size": spec.batch.rampup_batch_size is not None,
        f"parallel.outer_steps={spec.parallel.outer_steps}": spec.parallel.outer_steps > 0,
        "model.moe.balance_bias": moe.balance_bias,
        "model.moe.balance_loss=global": moe.num_experts is not None and moe.balance_loss == "global",
    }
    found = [name for name, is_set in settings.items() if is_set]
    if found:
        raise ValueError(
            f"{', '.join(found)}: a step of separate pieces leaves this out; run the step by megalaunch.TrainStep"
        )
