"""Compose recipes and summarize each as a row: model, size, devices, layout, sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from megalaunch.cli.recipes.table import RecipeRow
from megalaunch.config.compose import Composer
from megalaunch.config.errors import ConfigError
from megalaunch.config.recipes import read_summary
from megalaunch.plan.parameters import count_parameters
from megalaunch.plan.resolve import derive
from megalaunch.plan.world import world_size
from megalaunch.schema.parallel import ParallelSpec


def compose_rows(files: Mapping[str, Path]) -> list[RecipeRow]:
    """Return the row of each recipe; `problem` is set for a recipe that does not compose."""
    composer = Composer()
    return [_row(name, read_summary(path), composer) for name, path in files.items()]


def _row(name: str, summary: str, composer: Composer) -> RecipeRow:
    try:
        composition = composer.compose([f"recipe={name}"])
    except ConfigError as error:
        return RecipeRow(name, summary, problem=error.problems[0].message)
    written, spec = composition.spec, derive(composition.spec)[0]
    fewest = None if written.platform.chip == "auto" else world_size(spec.cluster)
    count = count_parameters(spec.model) if spec.model.vocab_size is not None else None
    return RecipeRow(
        name,
        summary,
        model=spec.model.name,
        parameters=count.decoder if count else None,
        active=count.active if count and spec.model.moe.num_experts is not None else None,
        devices=fewest,  # None: the recipe runs on the devices of any machine
        chip=None if written.platform.chip == "auto" else written.platform.chip,
        layout=" ".join(layout_text(written.parallel)),
        sequence_length=spec.batch.sequence_length,
        micro_batch_size=written.batch.micro_batch_size,
        global_batch_size=spec.batch.global_batch_size,
    )


def layout_text(parallel: ParallelSpec) -> Iterator[str]:
    """Yield the parts of a layout besides data parallelism: `tp4`, `pp8`, `sp`, ..."""
    for axis in ("tp", "pp", "vpp", "cp", "ep", "etp"):
        degree = getattr(parallel, axis)
        if degree is not None and degree > 1:
            yield f"{axis}{degree}"
    if parallel.sequence_parallel:
        yield "sp"
    if parallel.data_sharding == "optim_grads_params":
        yield "zero3"
    if (
        parallel.pipeline_layout
        or parallel.account_for_embedding_in_pipeline_split
        or parallel.account_for_loss_in_pipeline_split
        or _uneven(parallel)
    ):
        yield "uneven stages"


def _uneven(parallel: ParallelSpec) -> bool:
    return (
        parallel.num_layers_in_first_pipeline_stage is not None
        or parallel.num_layers_in_last_pipeline_stage is not None
    )
