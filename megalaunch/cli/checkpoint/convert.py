"""`megalaunch convert`: weights from a Hugging Face folder or from Megatron, into a folder, and into experts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from megalaunch.cli.help_pages import CommandGroup
from megalaunch.cli.usage_errors import ParametersCommand
from megalaunch.installation import install_command
from megalaunch.rundir.checkpoint.contents import TOKENIZER_FILE
from megalaunch.rundir.outcome import ExitCode


class ConvertGroup(CommandGroup):
    """The conversions; a path in place of one is most often converted to or from Hugging Face."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Name the conversion of a path that was given without one."""
        if args[0] not in self.commands and not ctx.resilient_parsing and (hint := _conversion_of(args)):
            ctx.fail(f"No such command {args[0]!r}. {hint}")
        return super().resolve_command(ctx, args)


def _conversion_of(arguments: list[str]) -> str:
    """Return the command line with the conversion of a Hugging Face folder, a checkpoint or a run; "" for a name."""
    from megalaunch.schema.remote import is_hub_address

    path = Path(arguments[0]).expanduser()
    if not (is_hub_address(arguments[0]) or len(path.parts) > 1 or path.exists()):
        return ""
    reads_folder = is_hub_address(arguments[0]) or (path / "config.json").is_file()
    name, to = ("import", "CHECKPOINT") if reads_folder else ("export", "HF_DIR")
    rest = arguments if "--output" in arguments else [*arguments, "--output", to]
    return f"Did you mean '{shlex.join(['megalaunch', 'convert', name, *rest])}'?"


app = typer.Typer(
    cls=ConvertGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Convert checkpoints from and to Hugging Face, from Megatron-LM and to experts, with numerical verification.",
)
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@app.command("import", cls=ParametersCommand)
def import_(
    folder: Annotated[
        Path, typer.Argument(metavar="HF_DIR", help="A folder with config.json and safetensors, or hf://ORG/NAME.")
    ],
    output: Annotated[Path, typer.Option(metavar="CHECKPOINT", help="The checkpoint to write.")],
) -> None:
    """Convert a Hugging Face folder to a checkpoint, and verify that both give the same logits.

    Tensors are converted one at a time and keep their dtype. If anything cannot be converted exactly, all reasons are
    listed and nothing is written.
    """
    from megalaunch.runs.hub_paths import local_model

    folder = local_model(folder)
    _require(folder, "a Hugging Face folder, with config.json and safetensors", "config.json")
    with _convert_errors():
        from megalaunch.engine import api

        report = api.import_huggingface(folder.expanduser(), output.expanduser(), _progress(output))
        typer.echo(_verification_line(report))
        typer.echo(f"wrote {output}")
        if (output.expanduser() / TOKENIZER_FILE).is_file():
            typer.echo(f'next: megalaunch generate {shlex.quote(str(output))} --prompt "..."')
        else:
            typer.echo(f"{folder} has no tokenizer: {output} can start a run but cannot generate text")


@app.command("export", cls=ParametersCommand)
def export(
    source: Annotated[Path, typer.Argument(metavar="CHECKPOINT|RUN_DIR", help="A checkpoint, or a run: its newest.")],
    output: Annotated[Path, typer.Option(metavar="HF_DIR", help="The folder to write.")],
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16 (default: the stored dtypes).")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Maximum size of a file.")] = "5GB",
) -> None:
    """Convert a checkpoint to a Hugging Face folder, and verify that both give the same logits."""
    from megalaunch.runs.errors import fail

    if dtype not in (None, "fp32", "bf16", "fp16"):
        fail(f"--dtype {dtype}: must be fp32, bf16 or fp16")
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)", max_shard_size.upper())
    if size is None or float(size[1]) == 0:
        fail(f"--max-shard-size {max_shard_size}: must be a number above 0 with KB, MB, GB or TB")
    assert size is not None
    if not source.expanduser().is_dir():
        fail(f"{source} is not a directory: name a run directory or one of its checkpoints/step_<number>")
    with _convert_errors():
        from megalaunch.engine import api

        report = api.export_huggingface(
            source.expanduser(),
            output.expanduser(),
            api.dtype_from_name(dtype) if dtype else None,
            max(1, int(float(size[1]) * _UNITS[size[2]])),
            report=lambda message: typer.echo(message, err=True),
            wrote=_progress(output),
        )
        typer.echo(_verification_line(report))
        typer.echo(f"wrote {output}")


@app.command("import-megatron", cls=ParametersCommand)
def import_megatron(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A torch_dist checkpoint, or its run.")],
    output: Annotated[Path, typer.Option(metavar="CHECKPOINT", help="The checkpoint to write.")],
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Read its pickles, see below.")] = False,
    vocab_size: Annotated[int | None, typer.Option(help="Vocabulary size without Megatron's padding.")] = None,
) -> None:
    """Convert a GPT checkpoint of Megatron-LM (torch_dist) to a megalaunch checkpoint.

    Megatron stores metadata of checkpoints as pickles, which can execute code when they are unpickled. --allow-pickle
    reads them in a separate process that accepts only the names of tensors, plain containers and Megatron's records and
    runs none of their code.
    """
    from megalaunch.runs.errors import fail

    if not allow_pickle:
        fail(
            f"{directory} stores metadata as pickles, which can contain code. megalaunch reads them in a separate "
            "process that accepts only the names of tensors, plain containers and Megatron's records and runs none "
            "of their code.\n  fix:  if you trust its author, add --allow-pickle"
        )
    _require(directory, "a torch_dist checkpoint, or its run")
    with _convert_errors():
        from megalaunch.engine import api
        from megalaunch.importers.megatron.saved_arguments import ArgumentsError, model_from_saved

        source = api.MegatronCheckpoint(directory.expanduser())
        try:
            model = model_from_saved(source.arguments, output.name)
        except ArgumentsError as error:
            problems = "\n  ".join(error.problems)
            fail(f"{directory} cannot be converted exactly:\n  {problems}", ExitCode.CHECKPOINT)
        report = api.import_megatron(source, model, output.expanduser(), vocab_size, _progress(output))
        typer.echo(f"read {directory}, iteration {source.iteration}")
        typer.echo(_verification_line(report))
        typer.echo(f"wrote {output}")


@app.command("upcycle", cls=ParametersCommand)
def upcycle(
    source: Annotated[Path, typer.Argument(metavar="CHECKPOINT|RUN_DIR", help="A checkpoint, or a run: its newest.")],
    output: Annotated[Path, typer.Option(metavar="CHECKPOINT", help="The checkpoint to write.")],
    experts: Annotated[int, typer.Option(min=1, help="Experts of every layer.")],
    top_k: Annotated[int, typer.Option(min=1, help="Experts per token.")] = 2,
    granularity: Annotated[int, typer.Option(min=1, help="Experts that a copy of a dense block is split into.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the routers.")] = 1234,
) -> None:
    """Convert a dense checkpoint to a mixture of experts, and verify that both give the same logits.

    Every feed-forward block becomes copies of itself, as experts, with a random router. Experts differ once they are
    trained. Optimizer states are not converted.
    """
    from megalaunch.runs.errors import fail

    if not source.expanduser().is_dir():
        fail(f"{source} is not a directory: name a run directory or one of its checkpoints/step_<number>")
    with _convert_errors():
        from megalaunch.engine import api

        report = api.upcycle(
            source.expanduser(),
            api.Upcycling(experts, top_k, granularity, seed),
            output.expanduser(),
            report=lambda message: typer.echo(message, err=True),
            wrote=_progress(output),
        )
        typer.echo(
            f"verified: {report['compared']}: largest difference to the dense model "
            f"{report['largest_difference']:.2g} (tolerance {report['tolerance']:.2g})"
        )
        typer.echo(f"wrote {output}")


def _require(folder: Path, kind: str, file: str = "") -> None:
    """Refuse a missing folder before torch is imported, which takes seconds."""
    from megalaunch.importers.huggingface.folder import gguf_refusal
    from megalaunch.runs.errors import fail

    where = folder.expanduser()
    if folder.suffix == ".gguf":
        fail(gguf_refusal(folder), ExitCode.CHECKPOINT)
    if not where.is_dir():
        fail(f"{folder} is not a directory: name {kind}", ExitCode.CHECKPOINT)
    if (where / "adapter_config.json").is_file() or any(where.glob("*.gguf")):
        return  # the reader of folders refuses these with the reason
    if file and not (where / file).is_file():
        fail(f"{folder} has no {file}: name {kind}", ExitCode.CHECKPOINT)


@contextmanager
def _convert_errors() -> Iterator[None]:
    """End the command with a sentence and the exit code of an error."""
    from megalaunch.runs.errors import fail, refuse

    if find_spec("torch") is None:
        fail(f"convert needs torch, which is not installed; add it with: {install_command('megalaunch[train]')}")
    from megalaunch.engine import api

    try:
        yield
    except api.CheckpointError as error:
        fail(str(error), ExitCode.CHECKPOINT)
    except (NotADirectoryError, ValueError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        refuse("", ExitCode.INTERRUPTED)


def _progress(output: Path) -> Callable[[int, int], None]:
    from megalaunch.cli.output.progress import percent_progress

    return percent_progress(output.name, after=f"{output.name}: written, verifying")


def _verification_line(report: dict[str, Any]) -> str:
    """Return the results of the comparisons; without transformers nothing is verified."""
    weights = (
        f"{report['compared']}: largest difference {report['largest_difference']:.2g} "
        f"(tolerance {report['tolerance']:.2g}; folder read by {report['reader_of_the_folder']})"
    )
    config, notes = report["config"], [f"note: {note}" for note in report.get("notes", ())]
    if not report["verified"]:
        return "\n".join([*notes, f"not verified: {config['reason']}", f"compared: {weights}"])
    read = (
        f"config.json as {config['reader']} reads it: logits of {config['layers']} layers with its keys and positions "
        f"to {config['last_position']:,}: largest difference {config['difference']:.2g} "
        f"(tolerance {config['tolerance']:.2g})"
    )
    return "\n".join([*notes, f"verified: {read}", f"verified: {weights}"])
