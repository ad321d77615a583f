"""Text to token files in Megatron's format, in order, with several processes; needs no torch and no process group."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from megalaunch.data.errors import DataError
from megalaunch.data.indexed_dataset.builder import token_type
from megalaunch.data.preprocess.chunking import Chunk, Position, chunks
from megalaunch.data.preprocess.encode_chunk import Encoded, EncoderConfig
from megalaunch.data.preprocess.encoder_backend import BackendTrial, EncoderBackend
from megalaunch.data.preprocess.encoder_pool import Workers
from megalaunch.data.preprocess.inputs import Input, InputHashes, check_unchanged, find_inputs
from megalaunch.data.preprocess.parse_records import valid_texts
from megalaunch.data.preprocess.report import write_reports
from megalaunch.data.preprocess.settings import EngineChoice, Settings
from megalaunch.data.preprocess.state import Progress, State, resume_fingerprint
from megalaunch.data.preprocess.tokenizer_process import CHECKED_CHARACTERS, TokenizerInfo, TokenizerProcess
from megalaunch.data.preprocess.work_dir import WorkDir
from megalaunch.data.tokenizer.tokenizer import SpecialTokens, required_eod, required_special_tokens, tokenizer_file

_BEGINNING = Position(0, 0)


@dataclass(frozen=True)
class Result:
    """Result of a preprocessing run.

    Attributes:
        prefixes: prefix of each key's files.
        report: path of the (first) report.
        quarantine: file of the quarantined records; None if there are none.
        counts: final counts.
        bad_records: the first bad records, as (file, line, cause).
        engine: the encoder backend.
    """

    prefixes: tuple[Path, ...]
    report: Path
    quarantine: Path | None
    counts: Progress
    bad_records: list[dict[str, Any]]
    engine: EncoderBackend


def preprocess(
    inputs: Sequence[str],
    output_prefix: Path,
    settings: Settings,
    show: Callable[[Progress], None],
    note: Callable[[str], None] = lambda text: None,
    early: TokenizerProcess | None = None,
) -> Result:
    """Write `<output_prefix>_<key>_document.bin/.idx` for each key, and `.json` with counts and hashes.

    Documents keep their order for any number of workers.

    Args:
        inputs: files, directories, globs or `-`.
        output_prefix, settings: start of the output's names, and settings of the run.
        show: called with the counts after each chunk.
        note: called with each note to the user.
        early: process that is already loading the tokenizer of these settings; closed here.

    Raises:
        DataError: no file has its final name then, and finished work is saved for `settings.resume` (work_dir.py).
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise DataError("preprocessing was started by torchrun, once a process", fix="Start it by itself, once.")
    path = tokenizer_file(settings.tokenizer)
    workers = Workers(settings.workers, settings.chunk_bytes)
    try:
        with early or TokenizerProcess(path, settings.merges, settings.tiktoken) as loading:
            found = find_inputs(inputs, settings.format, note)
            ahead, texts = _peek_first_texts(found, settings)
            trial = BackendTrial(settings.engine, loading, path, texts)
            tokenizer = loading.known()
            end = required_eod(tokenizer.eod_id, path, "Leave out --append-eod.") if settings.append_eod else None
            around = _special_tokens(settings, tokenizer, path, note)
            level = "document" if settings.language is None else "sentence"
            finals = [output_prefix.with_name(f"{output_prefix.name}_{key}_{level}") for key in settings.json_keys]
            output = WorkDir(output_prefix, finals, token_type(tokenizer.vocab_size))
            done = False
            try:
                job = _PreprocessRun(found, settings, end, around, output, tokenizer, show, note)
                job.start(workers, trial, ahead)
                vocabulary = loading.vocabulary_hash()
                loading.close()
                job.run(workers)
                job.state.check_complete(", ".join(inputs), settings)
                if not job.state.counts.tokens:
                    note(f"the files hold no tokens: the text of all {job.state.counts.written:,} documents is empty")
                quarantine = job.state.counts.quarantined > 0
                kept = finals[0].with_name(f"{output_prefix.name}_quarantine.jsonl") if quarantine else None
                hashes = job.finish()
                made = output.build_indexes()
                made_with = (settings, tokenizer, vocabulary, around, job.engine)
                report, *_ = write_reports(finals, found, hashes, *made_with, job.state, made)
                output.publish(kept)
                done = True
                return Result(tuple(finals), report, kept, job.state.counts, job.state.bad, job.engine)
            finally:
                output.close(keep=not done and output.saved_state() is not None)
    finally:
        workers.close()


def _special_tokens(
    settings: Settings, tokenizer: TokenizerInfo, path: Path, note: Callable[[str], None]
) -> SpecialTokens:
    """Return the special tokens for every sequence, and note them to the user."""
    if not settings.add_special_tokens:
        return SpecialTokens()
    around = required_special_tokens(tokenizer.around, path)
    if around:
        what = "sequence" if settings.language else "document"
        note(f"every {what} gets the tokenizer's own {around}, as by Megatron's tool; --no-bos leaves that out")
    return around


def _peek_first_texts(inputs: list[Input], settings: Settings) -> tuple[Iterator[Chunk], list[str]]:
    """Return an iterator over all chunks, and the texts of the first chunk."""
    ahead = chunks(inputs, settings, _BEGINNING)
    first = list(islice(ahead, 1))
    texts = [text for chunk in first for text in valid_texts(chunk, settings.json_keys, CHECKED_CHARACTERS)]
    return chain(first, ahead), texts


class _PreprocessRun:
    """One run over the inputs: reads chunks, passes them to the workers, writes the results and counts."""

    def __init__(
        self,
        inputs: list[Input],
        settings: Settings,
        end: int | None,
        around: SpecialTokens,
        output: WorkDir,
        tokenizer: TokenizerInfo,
        show: Callable[[Progress], None],
        note: Callable[[str], None],
    ) -> None:
        self._inputs, self._settings, self._output = inputs, settings, output
        self._end, self._around = end, around
        self._tokenizer, self._show, self._note = tokenizer, show, note
        self._fingerprint = resume_fingerprint(inputs, settings, tokenizer.content)
        saved = self._saved_state()
        self.state = State.load(saved) if saved else State(counts=Progress(sum(entry.size for entry in inputs)))
        output.open(saved)
        self.engine = EncoderBackend(settings.engine)
        self._hashes = InputHashes(inputs)
        self._checked = 0  # inputs before this index were unchanged after they were read
        self._whole = True  # whether state and files cover the same chunks
        self._checkpointed = time.monotonic()
        self._seconds_before = self.state.counts.seconds
        self._started = time.monotonic()

    def start(self, workers: Workers, trial: BackendTrial, ahead: Iterator[Chunk]) -> None:
        """Start the workers, with gigatoken if it loads, while gigatoken's ids are still being verified.

        Args:
            workers: the encoder pool.
            trial: the trial of the backends.
            ahead: all chunks from the start of the inputs.

        Raises:
            DataError: the requested backend cannot be used.
        """
        if self.state.complete:
            return
        self._kept = self._output.save_tokenizer(self._tokenizer.content)
        whole = self.state.position == _BEGINNING
        self._ahead = ahead if whole else chunks(self._inputs, self._settings, self.state.position)
        gigatoken = trial.gigatoken(self._tokenizer.content)
        workers.start(gigatoken)
        if gigatoken is not None:
            workers.prefetch(self._ahead, self._recipe(EngineChoice.GIGATOKEN))
        self._hashes.start()  # starts a thread, so all workers must be forked before
        self.engine = trial.backend()
        if self.engine.note:
            self._note(self.engine.note)

    def run(self, workers: Workers) -> None:
        """Encode all records from the saved position to the end, into the work directory."""
        if self.state.complete:
            return
        try:
            for chunk, encoded in workers.encode(self._ahead, self._recipe(self.engine.name)):
                self._write_chunk(chunk, encoded)
                if time.monotonic() - self._checkpointed >= self._settings.checkpoint_seconds:
                    self._checkpoint()
        except (DataError, KeyboardInterrupt) as error:
            if isinstance(error, DataError):
                self._refuse_changed(self._inputs)  # a changed file is the better explanation of a bad record
            if self._whole and self.state.counts.documents:
                self._checkpoint_best_effort()
            raise

    def _recipe(self, engine: EngineChoice) -> EncoderConfig:
        return EncoderConfig(
            engine=engine,
            tokenizer=self._kept,
            vocab_size=self._tokenizer.vocab_size,
            keys=self._settings.json_keys,
            end=self._end,
            dtype=self._output.dtype,
            language=self._settings.language,
            record_bytes=self._settings.record_bytes,
            around=self._around,
        )

    def finish(self) -> list[str]:
        """Checkpoint the complete output and return the hashes of the inputs. DataError if an input has changed."""
        self._refuse_changed(self._inputs)
        self.state.complete = True
        self._checkpoint()
        hashes = self._hashes.finish()
        self._refuse_changed(self._inputs)  # so that the hashes are of the bytes that were encoded
        self._count_seconds()
        return hashes

    def _refuse_changed(self, inputs: Sequence[Input]) -> None:
        """Raise DataError if an input changed since the start; the finished work is then not resumable."""
        try:
            check_unchanged(inputs)
        except DataError:
            self._output.discard_state()
            raise

    def _write_chunk(self, chunk: Chunk, encoded: Encoded) -> None:
        """Write and count a chunk; DataError for its first bad record if bad records stop the run."""
        self._whole = False
        try:
            quarantined = self.state.count_chunk(chunk, encoded, self._settings)
        except DataError:  # raised before anything was counted
            self._whole = True
            raise
        self._output.add(encoded.keys, quarantined)
        self._whole = True
        self._count_seconds()
        self._hashes.reached(self.state.counts.bytes_read)
        self._show(self.state.counts)

    def _count_seconds(self) -> None:
        self.state.counts.seconds = self._seconds_before + time.monotonic() - self._started

    def _checkpoint(self) -> None:
        position = self.state.position.file
        self._refuse_changed(self._inputs[self._checked : position + 1])
        self._checked = position
        self._output.checkpoint({"fingerprint": self._fingerprint, **self.state.to_save()})
        self._checkpointed = time.monotonic()

    def _checkpoint_best_effort(self) -> None:
        """Save finished work after an error; a second error must not hide the first."""
        try:
            self._checkpoint()
        except DataError:
            return

    def _saved_state(self) -> dict[str, Any] | None:
        """Return the state to resume from; None starts from the beginning."""
        saved = self._output.saved_state()
        if not self._settings.resume:
            if saved is not None:
                self._note("starting anew; --resume would have gone on with what an earlier run had done")
            return None
        if any(entry.is_stdin for entry in self._inputs):
            raise DataError("standard input cannot be read again", fix="Leave out --resume, or give a file.")
        if saved is None:
            self._note("there is nothing to resume; starting from the beginning")
            return None
        if saved["fingerprint"] != self._fingerprint:
            changed = [key for key, value in self._fingerprint.items() if saved["fingerprint"].get(key) != value]
            cause = f"the unfinished run had other {' and '.join(changed)}"
            raise DataError(cause, file=self._output.folder, fix="Give the same again, or leave out --resume.")
        return saved
