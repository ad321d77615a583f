"""`megalaunch data cache`: prepare the data of a run in advance, on a machine without accelerators."""

from __future__ import annotations

from typing import Annotated

import typer


def cache(
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides, as for train.")] = None,
) -> None:
    """Prepare the data of a run in advance: tokenize its corpus, and build and cache its sample index.

    Takes the overrides of `megalaunch train`. A run with the same overrides and data.cache_directory uses the cache.
    """
    import time

    from megalaunch.config.compose import compose
    from megalaunch.config.errors import ConfigError
    from megalaunch.data.errors import DataError
    from megalaunch.data.prepare import data_overrides, prepare
    from megalaunch.data.samples.build_datasets import build_train_dataset, build_valid_dataset
    from megalaunch.hub.name import HubError
    from megalaunch.plan.report import problems_text
    from megalaunch.plan.resolve import resolve
    from megalaunch.platform.detect import detect_machine
    from megalaunch.rundir.outcome import ExitCode
    from megalaunch.runs.epoch_check import check_epochs
    from megalaunch.runs.errors import fail, refuse
    from megalaunch.runs.hub_names import fetch_hub_files, pin_hub_names
    from megalaunch.schema import with_values

    try:
        composition = compose(overrides or [])
    except ConfigError as error:
        refuse(problems_text(error.problems))
    spec = resolve(composition.spec, detect_machine(), composition.choices.get("recipe")).spec
    started = time.monotonic()
    try:
        spec = pin_hub_names(spec)
        local = fetch_hub_files(spec, begun=True, say=typer.echo)
        prepared = prepare(local.data, local.tokenizer, typer.echo)
        spec = with_values(spec, data_overrides(prepared))
        training, validation = build_train_dataset(spec), build_valid_dataset(spec)
    except (DataError, HubError) as error:
        fail(str(error), ExitCode.DATA)
    typer.echo(f"training: {len(training):,} samples of {spec.batch.sequence_length:,} tokens")
    typer.echo(f"validation: {0 if validation is None else len(validation):,} rows")
    for finding in check_epochs(spec):
        typer.echo(f"{finding.severity}: {finding.message}")
    typer.echo(f"ready in {spec.data.cache_directory} after {time.monotonic() - started:.1f} s")
