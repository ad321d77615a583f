"""Whether the files that a run names for its data and tokenizer are on this machine and can be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.corpus.documents import find_corpus
from megalaunch.data.samples.blended_dataset import parse_blend
from megalaunch.data.samples.validation_sets import parse_validation_sets
from megalaunch.runs.corpus_check import check_corpus
from megalaunch.schema import RunSpec
from megalaunch.schema.remote import is_hub_address


def describe_own_files(spec: RunSpec) -> str:
    """Return a sentence about the run's own files, "" if it names none; a missing file may be on another machine.

    Raises:
        DataError: the weights of a blend are not valid.
    """
    problems = [finding.message for finding in check_corpus(spec) if finding.severity == "error"]
    files = list(dict.fromkeys(_files(spec)))
    problems += [problem for path in files if (problem := _problem(path))]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return f"the run's own data cannot be read here: {problems[0]}{more}"
    if not files:
        return ""
    return f"the run's own {f'{len(files):,} data files' if len(files) > 1 else 'data file'} can be read here"


def _files(spec: RunSpec) -> Iterator[Path]:
    """Yield the files of prepared tokens, of a corpus or conversations that were found, and of the tokenizer."""
    data = spec.data
    prefixes = [prefix for prefix in (data.train_prefix, data.validation_prefix) if prefix is not None]
    blends = (data.blend, data.validation_blend)
    blended = [entry.prefix for blend in blends for entry in parse_blend(blend)]
    sets = parse_validation_sets(data.validation_sets).values()
    blended += [one.prefix for parts in sets for one in parts]
    for prefix in (*prefixes, *map(str, blended)):
        if is_hub_address(prefix):
            continue
        yield Path(f"{prefix}.bin").expanduser()
        yield Path(f"{prefix}.idx").expanduser()
    for source in filter(None, (data.corpus, data.sft_data)):
        try:
            files = find_corpus(source, data.json_key).files
            yield from (file.path for file in files if isinstance(file.path, Path))
        except (DataError, ValueError, RuntimeError, OSError):
            continue  # check_corpus reports it
    if spec.tokenizer.path is not None and not is_hub_address(spec.tokenizer.path):
        path = Path(spec.tokenizer.path).expanduser()
        yield path / "tokenizer.json" if path.is_dir() else path


def _problem(path: Path) -> str:
    try:
        with path.open("rb"):
            return ""
    except (OSError, ValueError) as error:  # a NUL byte
        return f"{path}: {error.strerror if isinstance(error, OSError) else error}"
