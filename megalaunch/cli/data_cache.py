"""`megalaunch data cache`: make everything that a run reads before it starts, on a machine without accelerators."""

from __future__ import annotations

from typing import Annotated

import typer


def cache(
    words: Annotated[
        list[str] | None, typer.Argument(help="The GROUP=OPTION and SECTION.KEY=VALUE words of train.")
    ] = None,
) -> None:
    """Prepare the data of a run ahead: encode its corpus, build and keep the order of its samples.

    Takes the words of `megalaunch train`; a run with the same words and data.cache_directory then finds it all.
    """
    import time

    from megalaunch.cli.exit import fail, refuse
    from megalaunch.cli.render import problems_text
    from megalaunch.cli.token_findings import token_findings
    from megalaunch.config.compose import compose
    from megalaunch.config.errors import ConfigError
    from megalaunch.config.schema import with_values
    from megalaunch.data.errors import DataError
    from megalaunch.data.prepare import prepare, prepared_values
    from megalaunch.data.source import open_training, open_validation
    from megalaunch.plan.resolve import resolve
    from megalaunch.platform.detect import detect_machine
    from megalaunch.rundir.outcome import ExitCode

    try:
        composition = compose(words or [])
    except ConfigError as error:
        refuse(problems_text(error.problems))
    spec = resolve(composition.spec, detect_machine(), composition.choices.get("recipe")).spec
    started = time.monotonic()
    try:
        prepared = prepare(spec.data, spec.tokenizer, typer.echo)
        spec = with_values(spec, prepared_values(prepared))
        training, validation = open_training(spec), open_validation(spec)
    except DataError as error:
        fail(str(error), ExitCode.DATA)
    typer.echo(f"training: {len(training):,} samples of {spec.batch.sequence_length:,} tokens")
    typer.echo(f"validation: {0 if validation is None else len(validation):,} rows")
    for finding in token_findings(spec):
        typer.echo(f"{finding.severity}: {finding.message}")
    typer.echo(f"ready in {spec.data.cache_directory} after {time.monotonic() - started:.1f} s")
