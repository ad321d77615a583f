"""The text-to-token pipeline: reads records in chunks, encodes them in order, and writes Megatron's token files.

`megalaunch preprocess` (preprocess.py) and `data.corpus` (corpus/build.py) write their token files with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeAlias

from megalaunch.data.errors import DataError
from megalaunch.data.indexed_dataset.builder import token_type
from megalaunch.data.preprocess.chunking import Chunk, Position
from megalaunch.data.preprocess.encode_chunk import Encoded, EncodedKey, EncoderConfig
from megalaunch.data.preprocess.encoder_backend import BackendTrial, EncoderBackend
from megalaunch.data.preprocess.encoder_pool import EncoderPool
from megalaunch.data.preprocess.inputs import Input, check_unchanged
from megalaunch.data.preprocess.readers import InputHashes
from megalaunch.data.preprocess.records import valid_texts
from megalaunch.data.preprocess.settings import EngineChoice, Settings
from megalaunch.data.preprocess.state import Progress, State, WorkDir, resume_fingerprint
from megalaunch.data.preprocess.tokenizer_loader import CHECKED_CHARACTERS, TokenizerInfo, TokenizerLoader
from megalaunch.data.tokenizer.tokenizer import SpecialTokens, required_eod, required_special_tokens, tokenizer_file

# Assigns the documents of a chunk to token files. Arguments: the chunk, its documents, the index of the input that it
# starts in, and the lines of that input before it. Returns the documents of each file.
Partition: TypeAlias = Callable[[Chunk, Encoded, int, int], list[EncodedKey]]


@dataclass(frozen=True)
class Job:
    """The inputs and outputs of one run.

    Attributes:
        inputs: the files.
        chunks: reads the inputs from a position.
        output_prefix: prefix after which the work directory is named.
        finals: prefixes of the token files: one a key, or those of `partition`.
        partition: assigns documents to the token files; None: a file has the documents of one key.
        hashed: the inputs whose hashes are computed while they are read.
        start: byte of the first input at which the records begin.
        size: bytes of the inputs to read; None: all.
        lines_before: number of lines of the first input before `start`.
    """

    inputs: list[Input]
    chunks: Callable[[Position], Iterator[Chunk]]
    output_prefix: Path
    finals: Sequence[Path]
    partition: Partition | None = None
    hashed: Sequence[Input] = ()
    start: int = 0
    size: int | None = None
    lines_before: Callable[[], int] = lambda: 0

    @property
    def beginning(self) -> Position:
        """Position of the first record."""
        return Position(0, self.start)


class TextToTokens:
    """One run of the pipeline: `start`, then `encode`, `finish` and `publish`, each once.

    Attributes:
        tokenizer: properties of the tokenizer.
        special_tokens: special tokens that every sequence gets.
        backend: the selected encoder backend.
        state: counts, bad records and the position in the inputs.
        output: the work directory.
    """

    def __init__(
        self,
        job: Job,
        settings: Settings,
        tokenizer: TokenizerInfo,
        output: WorkDir,
        pool: EncoderPool,
        show: Callable[[Progress], None],
        note: Callable[[str], None],
    ) -> None:
        self.tokenizer, self.output = tokenizer, output
        self._job, self._settings, self._pool = job, settings, pool
        self._show, self._note = show, note
        self._eod, self.special_tokens = _added_tokens(settings, tokenizer, note)
        self._fingerprint = resume_fingerprint(job.inputs, settings, tokenizer.content)
        saved = self._saved_state()
        size = sum(entry.size for entry in job.inputs) if job.size is None else job.size
        self.state = State.load(saved) if saved else State(Progress(size), job.beginning)
        output.open(saved)
        self._tokenizer_path = output.save_tokenizer(tokenizer.content)
        self.backend = EncoderBackend(settings.engine)
        self._chunks: Iterator[Chunk] = iter(())
        self._hashes = InputHashes(job.hashed)
        self._unchanged = 0  # inputs before this index were unchanged after they were read
        self._consistent = True  # whether state and files cover the same chunks
        self._checkpointed = time.monotonic()
        self._seconds_before = self.state.counts.seconds
        self._started = time.monotonic()

    @classmethod
    @contextmanager
    def start(
        cls,
        job: Job,
        settings: Settings,
        loader: TokenizerLoader,
        show: Callable[[Progress], None],
        note: Callable[[str], None] = lambda text: None,
    ) -> Iterator[TextToTokens]:
        """Start everything that a run needs, overlapping what takes long; end it on exit.

        Numpy's import, the tokenizer and gigatoken take 100 to 200 ms each. Both libraries hold Python's GIL while
        loading, and a process with threads must not fork. Hence this order, which saves about 0.3 s:

        1. `loader` has forked a process that loads the tokenizer, before numpy was imported here.
        2. Spawn the workers if this process cannot fork them (`EncoderPool`): they take longest to start.
        3. Read the first chunk.
        4. The loader's process encodes its texts with `tokenizers` while gigatoken loads here (`BackendTrial`).
        5. Open the work directory, with the dtype of the tokenizer's vocabulary; load the state to resume from.
        6. Fork the workers: they inherit gigatoken and share memory with this process.
        7. The workers encode the first chunks with gigatoken before its ids are compared.
        8. Start the thread that hashes the inputs: nothing forks after that.
        9. Compare the ids of both backends. If they differ, the first chunks are encoded again (`encode`).
        10. End the loader's process.

        Raises:
            DataError: the inputs, the tokenizer, the requested backend or the output cannot be used.
        """
        with EncoderPool(settings.workers, settings.chunk_bytes, settings.fixes) as pool:
            chunks, texts = _peek_first_texts(job.chunks(job.beginning), settings)
            trial = BackendTrial(settings.engine, loader, texts)
            tokenizer = loader.info()
            dtype = token_type(tokenizer.vocab_size)
            with WorkDir(job.output_prefix, job.finals, dtype, settings.fixes.disk_full) as output:
                run = cls(job, settings, tokenizer, output, pool, show, note)
                if not run.state.complete:
                    run._start_workers(trial, chunks)
                loader.release()
                yield run

    def _start_workers(self, trial: BackendTrial, chunks: Iterator[Chunk]) -> None:
        """Steps 6 to 9 of `start`; `chunks` are those from the beginning."""
        position = self.state.position
        self._chunks = chunks if position == self._job.beginning else self._job.chunks(position)
        gigatoken = trial.gigatoken(self.tokenizer.content)
        self._pool.start(gigatoken)
        if gigatoken is not None:
            self._pool.prefetch(self._chunks, self._encoder_config(EngineChoice.GIGATOKEN))
        self._hashes.start()
        self.backend = trial.backend()

    def encode(self) -> None:
        """Encode all records from the saved position to the end, into the work directory.

        Raises:
            DataError: finished work is saved for `settings.resume`.
        """
        if self.state.complete:
            return
        try:
            for chunk, encoded in self._pool.encode(self._chunks, self._encoder_config(self.backend.name)):
                self._write_chunk(chunk, encoded)
                if time.monotonic() - self._checkpointed >= self._settings.checkpoint_seconds:
                    self._checkpoint()
        except (DataError, KeyboardInterrupt) as error:
            if isinstance(error, DataError):
                self._refuse_changed(self._job.inputs)  # a changed file is the better explanation of a bad record
            if self._consistent and self.state.counts.documents:
                self._checkpoint_best_effort()
            raise

    def finish(self) -> list[str]:
        """Checkpoint the complete output and return the hashes of the inputs. DataError if an input has changed."""
        self._refuse_changed(self._job.inputs)
        self.state.complete = True
        self._checkpoint()
        hashes = self._hashes.finish()
        self._refuse_changed(self._job.inputs)  # so that the hashes are of the bytes that were encoded
        self._count_seconds()
        return hashes

    def publish(self, quarantine: Path | None = None) -> None:
        """Give all files their final names, the quarantined records that of `quarantine`. Raises DataError."""
        self.output.publish(quarantine)

    def _encoder_config(self, engine: EngineChoice) -> EncoderConfig:
        return EncoderConfig(
            engine=engine,
            tokenizer=self._tokenizer_path,
            vocab_size=self.tokenizer.vocab_size,
            keys=self._settings.json_keys,
            end=self._eod,
            dtype=self.output.dtype,
            language=self._settings.language,
            record_bytes=self._settings.record_bytes,
            around=self.special_tokens,
            sentence_lists=self._settings.sentence_lists,
        )

    def _refuse_changed(self, inputs: Sequence[Input]) -> None:
        """Raise DataError if an input changed since the start; the finished work is then not resumable."""
        try:
            check_unchanged(inputs)
        except DataError:
            self.output.discard_state()
            raise

    def _write_chunk(self, chunk: Chunk, encoded: Encoded) -> None:
        """Write and count a chunk; DataError for its first bad record if bad records stop the run."""
        file, lines = self.state.position.file, self.state.line
        before = self._job.lines_before() if encoded.bad and file == 0 else 0
        self._consistent = False
        try:
            quarantined = self.state.count_chunk(chunk, encoded, self._settings, before)
        except DataError:  # raised before anything was counted
            self._consistent = True
            raise
        partition = self._job.partition
        self.output.add(encoded.keys if partition is None else partition(chunk, encoded, file, lines), quarantined)
        self._consistent = True
        self._count_seconds()
        self._hashes.reached(self.state.counts.bytes_read)
        self._show(self.state.counts)

    def _count_seconds(self) -> None:
        self.state.counts.seconds = self._seconds_before + time.monotonic() - self._started

    def _checkpoint(self) -> None:
        position = self.state.position.file
        self._refuse_changed(self._job.inputs[self._unchanged : position + 1])
        self._unchanged = position
        self.output.checkpoint({"fingerprint": self._fingerprint, **self.state.to_save()})
        self._checkpointed = time.monotonic()

    def _checkpoint_best_effort(self) -> None:
        """Save finished work after an error; a second error must not hide the first."""
        try:
            self._checkpoint()
        except DataError:
            return

    def _saved_state(self) -> dict[str, Any] | None:
        """Return the state to resume from; None starts from the beginning."""
        saved = self.output.saved_state()
        if not self._settings.resume:
            if saved is not None:
                self._note("starting from the beginning; --resume would continue the unfinished run")
            return None
        if any(entry.is_stdin for entry in self._job.inputs):
            raise DataError("standard input cannot be read again", fix="Leave out --resume, or give a file.")
        if saved is None:
            self._note("there is nothing to resume; starting from the beginning")
            return None
        if saved["fingerprint"] != self._fingerprint:
            changed = [key for key, value in self._fingerprint.items() if saved["fingerprint"].get(key) != value]
            cause = f"the unfinished run had other {' and '.join(changed)}"
            raise DataError(cause, file=self.output.folder, fix="Give the same again, or leave out --resume.")
        return saved


def _peek_first_texts(chunks: Iterator[Chunk], settings: Settings) -> tuple[Iterator[Chunk], list[str]]:
    """Return an iterator over all chunks, and the texts of the first one."""
    first = list(islice(chunks, 1))
    texts = [text for chunk in first for text in valid_texts(chunk, settings.json_keys, CHECKED_CHARACTERS)]
    return chain(first, chunks), texts


def _added_tokens(
    settings: Settings, tokenizer: TokenizerInfo, note: Callable[[str], None]
) -> tuple[int | None, SpecialTokens]:
    """Return the end-of-document token and the special tokens of every sequence, which are noted to the user."""
    path, fixes = tokenizer_file(settings.tokenizer), settings.fixes
    eod = required_eod(tokenizer.eod_id, path, fixes.no_eod) if settings.append_eod else None
    if not settings.add_special_tokens:
        return eod, SpecialTokens()
    around = required_special_tokens(tokenizer.around, path)
    if around:
        unit = "sequence" if settings.language else "document"
        note(f"every {unit} gets the tokenizer's own {around}{fixes.no_special_tokens}")
    return eod, around
