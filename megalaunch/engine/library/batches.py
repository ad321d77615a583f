"""Batches of a step, from a data set or from samples that a loop reads by itself."""

from __future__ import annotations

from collections.abc import Sequence

from megalaunch.data.samples.sample import Dataset, Sample
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.train.dataloader import PrefetchingDataLoader, StepBatch, make_batch_sampler, make_step_batch
from megalaunch.schema import RunSpec


def make_data_loader(spec: RunSpec, mesh: Mesh, dataset: Dataset) -> PrefetchingDataLoader:
    """Return a loader of this rank's microbatches: the samples of a step do not depend on the layout.

    `get(step, last)` returns the batch of a step, from 1; `close()` ends its thread.
    """
    return PrefetchingDataLoader(
        dataset, make_batch_sampler(spec, mesh), mesh.device, mtp_depths=spec.model.mtp.num_layers
    )


def make_batch(spec: RunSpec, mesh: Mesh, samples: Sequence[Sample], first: int) -> StepBatch:
    """Collate the samples of this data-parallel rank in one step, in the order of its microbatches.

    Ranks of one data-parallel rank (tp, cp and pp) pass the same samples: rank `mesh.dp_rank` of `mesh.dp_size`.

    Args:
        spec: The run spec.
        mesh: The device mesh.
        samples: `global_batch_size / dp` samples of `batch.sequence_length` + 1 tokens.
        first: Index of the first sample in all samples of the run, on which dropout depends.

    Raises:
        ValueError: Their number or length is another one.
    """
    batch, length = spec.batch, spec.batch.sequence_length
    expected = batch.global_batch_size // mesh.dp_size
    if len(samples) != expected:
        raise ValueError(
            f"a step has {expected} samples on each of {mesh.dp_size} data-parallel ranks "
            f"(batch.global_batch_size={batch.global_batch_size}), not {len(samples)}"
        )
    for number, sample in enumerate(samples):
        if len(sample.tokens) != length + 1:
            raise ValueError(
                f"sample {number} has {len(sample.tokens)} tokens, not batch.sequence_length + 1 = {length + 1}"
            )
    width = batch.micro_batch_size or 1
    indices = tuple(range(first + start, first + start + width) for start in range(0, len(samples), width))
    groups = [samples[start : start + width] for start in range(0, len(samples), width)]
    batch_of_rank = make_step_batch(make_batch_sampler(spec, mesh), indices, groups, spec.model.mtp.num_layers)
    return batch_of_rank.to(mesh.device)
