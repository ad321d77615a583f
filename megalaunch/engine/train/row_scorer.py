"""Log-likelihoods of continuations by the training model, under any layout.

Shapes: B batch, S positions, s a context-parallel rank's shard of them, P scored positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megalaunch.data.samples.sample import Sample
from megalaunch.engine.collectives import all_gather_async
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.parallel.pipeline_forward import PipelineForward
from megalaunch.engine.scored_pairs import Pair, check_pairs
from megalaunch.engine.train.dataloader import MicroBatch, collate, shard_for_context_parallel
from megalaunch.engine.train.loss import IGNORE_INDEX

_FILLER = 0  # right padding; with causal attention no real token attends to it


class RowScorer:
    """Computes log-likelihoods of pairs (context, continuation) with a parallelized model.

    Args:
        model: The parallelized model.
        mesh: The device mesh.
        forward_only: Forward passes through all stages.
        release: Frees the parameters that forward passes gathered.
    """

    def __init__(
        self, model: ModelParts, mesh: Mesh, forward_only: PipelineForward, release: Callable[[], None]
    ) -> None:
        self._model, self._mesh, self._forward_only, self._release = model, mesh, forward_only, release

    @torch.inference_mode(False)  # a sharded model keeps gathered parameters, which training continues to use
    @torch.no_grad()
    def score(
        self, pairs: Sequence[Pair], batch_size: int, longest: int, before_batch: Callable[[], None]
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood in nats, whether every token is the most likely one) of each pair. Collective.

        Data-parallel ranks share the rows of a batch; the results are the same on all ranks.

        Args:
            pairs: Token ids of contexts and continuations, neither empty.
            batch_size: Rows of a batch on one data-parallel rank.
            longest: Maximum tokens of a row; longer contexts are truncated from the left.
            before_batch: Called before each batch; what it raises has to be raised on all ranks.

        Raises:
            PairError: As `check_pairs`; on all ranks, since they have the same pairs.
        """
        check_pairs(pairs, longest)
        rows = [[*before, *after][-longest - 1 :] for before, after in pairs]
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]), reverse=True)
        sums = torch.zeros(2, len(rows), dtype=torch.float64, device=self._mesh.device)
        for start in range(0, len(order), batch_size * self._mesh.dp_size):
            self._forward_only.wait_for_sends()  # `before_batch` may end the scoring
            before_batch()
            chosen = order[start : start + batch_size * self._mesh.dp_size]
            width = self._padded(len(rows[chosen[0]]) - 1)
            mine = chosen[self._mesh.dp_rank * batch_size : (self._mesh.dp_rank + 1) * batch_size]
            samples = [_sample(rows[index], len(pairs[index][1]), width) for index in mine]
            samples += [_sample([_FILLER], 0, width)] * (batch_size - len(mine))
            logprobs_B, misses_B = self._score_batch(collate(samples))
            places = torch.tensor(mine, dtype=torch.int64, device=sums.device)
            sums[0, places] += logprobs_B[: len(mine)]
            sums[1, places] += misses_B[: len(mine)]
        self._forward_only.wait_for_sends()
        self._release()
        sums *= self._mesh.is_loss_rank  # tp ranks and stages of the same rows must not count them again
        dist.all_reduce(sums)
        return [(logprob, misses == 0) for logprob, misses in zip(*sums.tolist(), strict=True)]

    def _padded(self, width: int) -> int:
        """Return the width of a batch: cp shards come in pairs, and tp ranks share their tokens."""
        unit = 2 * self._mesh.cp.size * self._mesh.tp.size
        return -(-width // unit) * unit

    def _score_batch(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the sum of log-probabilities and the number of tokens that are not the most likely one, fp64 [B]."""
        rows = len(batch.tokens)
        batch = replace(batch, documents=None)
        batch = shard_for_context_parallel(batch, self._mesh.cp).map(lambda part: part.to(self._mesh.device))
        inputs = {name: value for name, value in batch.inputs.items() if name != "tokens"}
        logits_BsV = self._forward_only.run(batch.tokens, {**inputs, "logits": True})
        sums = torch.zeros(2, rows, dtype=torch.float64, device=self._mesh.device)
        if logits_BsV is None:  # an earlier stage
            return sums[0], sums[1]
        scored = batch.labels != IGNORE_INDEX
        labels_P, row_P = batch.labels[scored], scored.nonzero()[:, 0]
        vocab_axis = self._model.parts[-1].tp_region.vocab_axis
        gathered_PV = all_gather_async(logits_BsV[scored].float(), 1, vocab_axis).wait()
        logits_PV = gathered_PV[:, : self._model.config.vocab_size]  # without vocabulary padding
        logprobs_P = logits_PV.log_softmax(dim=-1).gather(1, labels_P[:, None])[:, 0]
        sums[0].index_add_(0, row_P, logprobs_P.double())
        sums[1].index_add_(0, row_P, (logits_PV.argmax(dim=-1) != labels_P).double())
        return sums[0], sums[1]


def _sample(row: Sequence[int], scored: int, width: int) -> Sample:
    """Return a row padded to `width` inputs; only its last `scored` tokens are labels with a loss."""
    tokens = np.full(width + 1, _FILLER, np.int64)
    tokens[: len(row)] = row
    mask = np.zeros(width, np.bool_)
    mask[len(row) - 1 - scored : len(row) - 1] = True
    return Sample(tokens, mask)
