"""`megalaunch validate-config`: report all problems of a run before it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from megalaunch.cli.train.hydra_options import Cfg, ConfigDirs, Info, show_composition, with_config_dirs

if TYPE_CHECKING:
    from megalaunch.config.compose import Composition
    from megalaunch.schema import RunSpec


def validate_config(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Overrides: GROUP=OPTION (parallel=tp4pp4) and SECTION.KEY=VALUE (train.steps=100)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    explain: Annotated[
        str | None, typer.Option(metavar="KEY", help="Show a key or section: value, meaning, where it comes from.")
    ] = None,
    config_dir: ConfigDirs = None,
    cfg: Cfg = None,
    info: Info = None,
) -> None:
    """Compose a run and report every problem at once, each with its numbers and a fix.

    Exit code 0 when it is valid, 2 when it is not.
    """
    from megalaunch.config.compose import compose
    from megalaunch.config.errors import ConfigError
    from megalaunch.plan.check import check
    from megalaunch.plan.findings import has_errors, sort_findings
    from megalaunch.plan.report import findings_json, findings_text, problems_as_findings, rules_wait
    from megalaunch.plan.resolve import resolve
    from megalaunch.plan.summary import derived_values
    from megalaunch.platform.detect import detect_machine
    from megalaunch.rundir.outcome import ExitCode
    from megalaunch.runs.corpus_check import check_corpus
    from megalaunch.runs.epoch_check import check_epochs
    from megalaunch.runs.errors import fail

    if as_json and (explain or cfg or info):
        fail("--json shows findings; it cannot be combined with --explain, --cfg or --info")
    typed = with_config_dirs(overrides, config_dir)
    if show_composition(typed, cfg, info):
        return
    later = ""
    try:
        composition = compose(typed)
    except ConfigError as error:
        findings, derived = problems_as_findings(error.problems), {}
        later = rules_wait(len(findings))
    else:
        machine = detect_machine()
        resolution = resolve(composition.spec, machine, composition.choices.get("recipe"))
        if explain is not None:
            _print_origin(explain, composition, resolution.spec)
            return
        found = check(resolution.spec, composition.origins, machine=machine) + check_epochs(resolution.spec)
        found += check_corpus(resolution.spec, composition.origins)
        repeated = problems_as_findings(composition.repeated, "warning")
        repeated += problems_as_findings(composition.notes, "note")
        findings = sort_findings([*repeated, *found, *resolution.notes])
        derived = derived_values(resolution.spec)
    valid = not has_errors(findings)
    typer.echo(findings_json(findings, derived) if as_json else findings_text(findings, derived) + later)
    if not valid:
        raise typer.Exit(int(ExitCode.CONFIGURATION))


def _print_origin(key: str, composition: Composition, spec: RunSpec) -> None:
    """Print the value of a key and where it comes from; end the command if there is no such key."""
    from megalaunch.config.errors import ConfigError
    from megalaunch.config.explain import explain_key
    from megalaunch.plan.report import problems_text
    from megalaunch.runs.errors import refuse

    try:
        typer.echo(explain_key(key, composition, spec))
    except ConfigError as error:
        refuse(problems_text(error.problems))
