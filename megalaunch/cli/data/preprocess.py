"""`megalaunch preprocess`: text, jsonl, parquet and arrow to token files in Megatron's layout."""

from __future__ import annotations

import gc
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from megalaunch.cli.data import path_names
from megalaunch.cli.data.preprocess_output import complete_text, errors_shown, note, summary
from megalaunch.cli.usage_errors import ParametersCommand
from megalaunch.data.preprocess.settings import EngineChoice, Format, MaxBad, OnBadRecord, Settings
from megalaunch.data.tokenizer.tiktoken_list import TiktokenOptions

ARGUMENTS = "megalaunch.arguments"  # of this command in the context's `meta`
_SETTING = re.compile(r"[a-z_]+(\.[a-z_0-9]+)+=")
_SMALL_TOKENIZER = ("--output", "tokenizer.json", "--vocab-size", "512")


class MegatronCommand(ParametersCommand):
    """Also accepts Megatron-LM's options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate Megatron's options, then parse the arguments."""
        from megalaunch.cli.data.megatron_args import translate_args
        from megalaunch.rundir.outcome import ExitCode
        from megalaunch.runs.errors import refuse

        try:
            rewritten = translate_args(args)
        except ValueError as error:
            refuse(str(error), ExitCode.CONFIGURATION)
        for text in rewritten.notes:
            note(text)
        ctx.meta[ARGUMENTS] = tuple(rewritten.arguments)
        return super().parse_args(ctx, rewritten.arguments)

    def examples(self, args: Sequence[str]) -> list[str]:
        """Return an example for a call without arguments, with a text and a tokenizer that are here."""
        return [] if args else example_commands(Path())


def example_commands(folder: Path) -> list[str]:
    """Return commands that work as typed in a folder: on its first text file, else on Python's license."""
    texts = sorted(path.name for path in folder.iterdir() if path.suffix in (".txt", ".jsonl", ".md", ".parquet"))
    text = texts[0] if texts else str(Path(os.__file__).with_name("LICENSE.txt"))
    commands = [] if (folder / "tokenizer.json").is_file() else [["tokenizer", "train", text, *_SMALL_TOKENIZER]]
    commands.append(["preprocess", text, "--output-prefix", "tokens", "--tokenizer", "tokenizer.json"])
    return ["for example, here:", *(f"  {shlex.join(['megalaunch', *command])}" for command in commands)]


Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUTS",
        help="Files, folders, globs or URLs (s3://, gs://, hf://, ...) of jsonl, parquet, arrow or text; - is stdin. "
        "With --shards also launcher=NAME and launcher.KEY=VALUE.",
    ),
]
TokenizerFile = Annotated[
    Path,
    typer.Option(
        metavar="TOKENIZER",
        help="tokenizer.json, GPT-2 vocabulary, SentencePiece model, tiktoken or tekken ranks, or hf://ORG/NAME.",
    ),
]
NoBos = Annotated[
    bool, typer.Option("--no-bos", help="Omit the special tokens (BOS) that the tokenizer adds to a text.")
]
JsonKeys = Annotated[
    list[str] | None, typer.Option(help="Key (column) of the text; may be repeated.", show_default="text")
]
BadRecords = Annotated[OnBadRecord, typer.Option(help="Action on a record that cannot be read.")]
MaxBadText = Annotated[
    str | None,
    typer.Option(metavar="N|N%", help="Maximum number or share of skipped bad records; more is an error."),
]
Engine = Annotated[EngineChoice, typer.Option(help="Encoder; auto: gigatoken if its ids equal those of tokenizers.")]
SplitSentences = Annotated[
    bool, typer.Option("--split-sentences", help="Write one sequence per sentence; the files end in _sentence.")
]
OutputPrefix = Annotated[
    Path,
    typer.Option(
        parser=path_names.output_prefix,
        metavar="OUTPUT_PREFIX",
        help="The files are OUTPUT_PREFIX_<key>_document.bin and .idx.",
    ),
]
Shards = Annotated[
    int | None, typer.Option(min=1, help="Divide the inputs into this many tasks, and merge their parts.")
]
ShardNumber = Annotated[
    int | None, typer.Option(min=0, help="Run only this task of --shards, from 0, and do not merge.")
]

Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace files that were made of other inputs or settings.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what --shards would submit or run, and end.")]
Detach = Annotated[bool, typer.Option("--detach", help="Return when launcher= has the shards; do not show them.")]

preprocess = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@preprocess.command(cls=MegatronCommand)
def run(
    context: typer.Context,
    inputs: Inputs,
    output_prefix: OutputPrefix,
    tokenizer: TokenizerFile,
    merges: Annotated[Path | None, typer.Option(help="Merges of a GPT-2 vocabulary; default: next to it.")] = None,
    tiktoken_pattern: Annotated[str, typer.Option(help="Pattern of Megatron's JSON tiktoken ranks: v1 or v2.")] = "v2",
    vocab_size: Annotated[int, typer.Option(help="Vocabulary size of these ranks, with special tokens.")] = 1 << 17,
    tiktoken_num_special_tokens: Annotated[int, typer.Option(help="Number of their special tokens.")] = 1000,
    workers: Annotated[int | None, typer.Option(min=1, help="Worker processes (default: one per core).")] = None,
    append_eod: Annotated[bool, typer.Option("--append-eod", help="End every document with the end token.")] = False,
    no_bos: NoBos = False,
    json_key: JsonKeys = None,
    format: Annotated[Format, typer.Option(help="Format of the inputs; auto: by suffix.")] = Format.AUTO,
    on_bad_record: BadRecords = OnBadRecord.STOP,
    max_bad: MaxBadText = None,
    max_record_mb: Annotated[float, typer.Option(min=0.001, help="Size above which a record is bad.")] = 64.0,
    engine: Engine = EngineChoice.AUTO,
    split_sentences: SplitSentences = False,
    language: Annotated[str, typer.Option(help="Language of the sentences.")] = "english",
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted run.")] = False,
    overwrite: Overwrite = False,
    checkpoint_every: Annotated[float, typer.Option(min=0, help="Seconds between checkpoints of the progress.")] = 10.0,
    log_interval: Annotated[int | None, typer.Option(min=1, help="Documents between two progress lines.")] = None,
    shards: Shards = None,
    shard: ShardNumber = None,
    merge: Annotated[bool, typer.Option("--merge", help="Only merge the parts of all --shards.")] = False,
    dry_run: DryRun = False,
    detach: Detach = False,
) -> None:
    """Tokenize text into .bin and .idx files in Megatron's format. Megatron's options work too."""
    from megalaunch.runs.hub_paths import local_data, local_tokenizer

    settings = Settings(
        tokenizer=local_tokenizer(tokenizer),
        merges=merges,
        tiktoken=TiktokenOptions(tiktoken_pattern, vocab_size, tiktoken_num_special_tokens),
        workers=workers or len(os.sched_getaffinity(0)),
        append_eod=append_eod,
        add_special_tokens=not no_bos,
        json_keys=tuple(dict.fromkeys(json_key or ["text"])),
        format=format,
        on_bad_record=on_bad_record,
        max_bad=_max_bad(max_bad, on_bad_record),
        engine=engine,
        language=language if split_sentences else None,
        resume=resume,
        record_bytes=int(max_record_mb * 1e6),
        checkpoint_seconds=checkpoint_every,
    )
    paths, prefix = local_data(_sources(inputs)), output_prefix.expanduser()
    words = [word for word in inputs if is_launcher_word(word)]
    if shards is None and shard is None and not (merge or dry_run or detach or words):
        preprocess_whole(paths, prefix, settings, log_interval, overwrite)
        return
    from megalaunch.cli.data.preprocess_shards import Sharded

    work = Sharded(paths, prefix, settings, shards, log_interval, context.meta[ARGUMENTS], tuple(words), overwrite)
    work.run(shard, merge, dry_run, detach)


def is_launcher_word(word: str) -> bool:
    """Return whether a word is an override of the launcher, as for `train`, and no input."""
    return word.startswith(("launcher=", "launcher."))


def _sources(words: Sequence[str]) -> list[str]:
    """Return the inputs among the words; end the command at a setting of a run, such as cluster.nodes=2."""
    from megalaunch.runs.errors import refuse

    sources = [word for word in words if not is_launcher_word(word)]
    for word in sources:
        if _SETTING.match(word) and not Path(word).exists():
            refuse(
                f"{word} is neither an input nor a setting of preprocess, whose settings are those of the launcher: "
                "launcher=NAME and launcher.KEY=VALUE."
            )
    return sources


def _max_bad(text: str | None, on_bad_record: OnBadRecord) -> MaxBad:
    if text is None:
        return MaxBad()
    from megalaunch.rundir.outcome import ExitCode
    from megalaunch.runs.errors import refuse

    if on_bad_record is OnBadRecord.STOP:
        fix = "the first bad record ends the run. Give --on-bad-record skip or quarantine with it."
        refuse(f"--max-bad {text}: {fix}", ExitCode.CONFIGURATION)
    try:
        return MaxBad.parse(text)
    except ValueError:
        fix = "give a number of records, such as 100, or a share of them, such as 1%."
        refuse(f"--max-bad {text}: {fix}", ExitCode.CONFIGURATION)


def preprocess_whole(
    inputs: list[str], prefix: Path, settings: Settings, log_interval: int | None, overwrite: bool
) -> None:
    """Write all token files in this process, and print the summary; end the command on an error."""
    with errors_shown("no file has its final name yet; continue with --resume", log_interval) as show:
        from megalaunch.data.preprocess.tokenizer_loader import TokenizerLoader

        with TokenizerLoader.start(settings.tokenizer, settings.merges, settings.tiktoken) as loader:
            from megalaunch.data.preprocess.existing_output import is_complete
            from megalaunch.data.preprocess.preprocess import preprocess as write_token_files

            if is_complete(inputs, prefix, settings, overwrite):
                typer.echo(complete_text(prefix))
                return

            gc.freeze()  # the garbage collector then ignores the imported modules, which saves time at exit
            result = write_token_files(inputs, prefix, settings, show, note, loader)
    typer.echo(summary(result))
