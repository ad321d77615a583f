"""Load a language model from a checkpoint or a Hugging Face folder: decoder, tokenizer and spec."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from megalaunch.data.errors import DataError
from megalaunch.data.tokenizer.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_json
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.export_huggingface import StoredWeights
from megalaunch.engine.checkpoint.hf_weights import HuggingFaceWeights
from megalaunch.engine.checkpoint.huggingface import HuggingFaceFolder, is_huggingface, other_format
from megalaunch.engine.checkpoint.import_checkpoint import make_spec
from megalaunch.engine.checkpoint.import_huggingface import tokenizer_text
from megalaunch.engine.checkpoint.load_tensors import read_tensors
from megalaunch.engine.checkpoint.retention import find_checkpoint
from megalaunch.engine.inference.chat_template import stop_token_ids
from megalaunch.engine.inference.fuse_projections import fuse_projections
from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.model.decoder import VOCAB_PARALLEL_PARAMS, Decoder
from megalaunch.engine.platform.registry import best_device, platform_of
from megalaunch.importers.huggingface.folder import CONFIG
from megalaunch.importers.huggingface.multimodal import TEXT_DECODER_ONLY
from megalaunch.importers.huggingface.registry import get_text_config, multimodal_family
from megalaunch.kernels.overridable import build_for
from megalaunch.rundir.checkpoint.contents import ORIGIN, SPEC_FILE, TOKENIZER_FILE, WEIGHTS
from megalaunch.schema import RunSpec, SpecError
from megalaunch.schema.model import ModelSpec
from megalaunch.schema.spec_file import read_spec


@dataclass(frozen=True)
class ModelSource:
    """A language model without its weights.

    Args:
        checkpoint: The directory of the weights.
        spec: The spec of its training run, or one made from a Hugging Face config.
        tokenizer: The tokenizer.
        files: Companion files of the weights, by their names in Hugging Face folders.
        eos_token_ids: Ids of the tokens that end a text.
        add_special_tokens: Whether texts get the special tokens of the tokenizer's post-processor, such as BOS.
    """

    checkpoint: Path
    spec: RunSpec
    tokenizer: Tokenizer
    files: Mapping[str, Path]
    eos_token_ids: frozenset[int]
    add_special_tokens: bool = field(default=True, kw_only=True)

    def encode(self, text: str) -> list[int]:
        """Tokenize a text, by default with special tokens, as transformers does."""
        return self.tokenizer.encode(text, self.add_special_tokens)


@dataclass(frozen=True)
class LanguageModel(ModelSource):
    """A language model with its weights loaded, and the projections of its decoder fused."""

    decoder: Decoder


def open_model(
    source: Path, report: Callable[[str], None] = lambda message: None, device: torch.device | None = None
) -> LanguageModel:
    """Load a language model.

    Args:
        source: A run directory (its newest valid checkpoint is loaded), a checkpoint or a Hugging Face folder.
        report: Called with a message for each skipped checkpoint, and with notes.
        device: The device; None: a GPU if there is one, else the CPU.

    Raises:
        NotADirectoryError: `source` is none of these.
        CheckpointError: There is no valid checkpoint, or it cannot be loaded.
    """
    return load_weights(open_source(source, report), device)


def open_source(source: Path, report: Callable[[str], None] = lambda message: None) -> ModelSource:
    """Read a language model as `open_model` does, without loading its weights."""
    other = other_format(source)
    if other is not None:
        raise CheckpointError(other)
    if is_huggingface(source):
        read = read_source(source)
        report(f"note: {not_verified_warning(source)}")
        if multimodal_family(HuggingFaceFolder(source).config) is not None:
            report(f"note: {source / CONFIG}: {TEXT_DECODER_ONLY}")
        return read
    try:
        return read_source(find_checkpoint(source, report))
    except NotADirectoryError as error:
        raise NotADirectoryError(f"{error}, or a Hugging Face folder (config.json and safetensors)") from error


def not_verified_warning(folder: Path) -> str:
    """Return a note that a folder's config was not verified against transformers, whose import takes seconds."""
    return (
        f"{folder / 'config.json'} is read by megalaunch alone, not verified against transformers "
        f"(megalaunch convert import {shlex.quote(str(folder))} --output CHECKPOINT verifies it)"
    )


def read_source(directory: Path) -> ModelSource:
    """Read a Hugging Face folder or a checkpoint without its weights.

    Raises:
        CheckpointError: A file is missing or invalid.
    """
    if is_huggingface(directory):
        folder = HuggingFaceFolder(directory)
        return _source_from_folder(folder, HuggingFaceWeights(folder))
    return _source_from_checkpoint(directory)


def load_language_model(checkpoint: Path, device: torch.device) -> LanguageModel:
    """Load a verified checkpoint. Raises CheckpointError if something in it is missing or does not match."""
    return load_weights(_source_from_checkpoint(checkpoint), device)


def load_weights(source: ModelSource, device: torch.device | None = None) -> LanguageModel:
    """Load the weights of a model source onto a device (None: a GPU if there is one, else the CPU).

    On a CPU the decoder computes in fp32, since decoding one token per step is memory-bound; elsewhere in the compute
    dtype of the run.

    Raises:
        CheckpointError: A folder cannot be read exactly, with all reasons, or a checkpoint is damaged.
    """
    device = device or best_device()
    dtype = _inference_dtype(source.spec, device)
    if is_huggingface(source.checkpoint):
        return LanguageModel(**vars(source), decoder=_decoder_from_folder(source, dtype, device))
    try:
        decoder = _decoder(source.checkpoint, source.spec, dtype, device)
    except (OSError, ValueError) as error:
        raise _load_error(source.checkpoint, error) from error
    return LanguageModel(**vars(source), decoder=decoder)


def _decoder_from_folder(source: ModelSource, dtype: torch.dtype, device: torch.device) -> Decoder:
    weights = HuggingFaceWeights(HuggingFaceFolder(source.checkpoint))
    with torch.device("meta"), build_for(device):
        decoder = build_decoder(source.spec.model)
    kept = dict(decoder.named_buffers())  # fp32: they balance experts in small steps
    placed = {
        name: value.to(device, kept[name].dtype if name in kept else dtype)
        for name, value in weights.iter_mapped(weights.shapes.keys())
    }
    decoder.load_state_dict(placed, strict=False, assign=True)
    decoder.tie()
    return fuse_projections(decoder.eval())


def _source_from_folder(folder: HuggingFaceFolder, weights: HuggingFaceWeights) -> ModelSource:
    text = tokenizer_text(folder)
    if text is None:
        raise CheckpointError(
            f"{folder.directory} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json), without which the "
            "model reads and writes no text; copy the one that belongs to the model there"
        )
    tokenizer, files = tokenizer_from_json(text), folder.companions()
    eos_token_ids = stop_token_ids(files, get_text_config(folder.config), tokenizer)
    return ModelSource(folder.directory, make_spec(weights.model), tokenizer, files, eos_token_ids)


def _source_from_checkpoint(checkpoint: Path) -> ModelSource:
    if (checkpoint / f"{ORIGIN}.json").is_file() and not (checkpoint / TOKENIZER_FILE).is_file():
        raise CheckpointError(
            f"{checkpoint} was imported without a tokenizer, so that the model reads and writes no text; import the "
            "weights again from a folder that has one"
        )
    try:
        spec = read_spec(checkpoint / SPEC_FILE)
        if spec.data.mock and not (checkpoint / TOKENIZER_FILE).is_file():
            raise DataError(
                "the run was trained on mock tokens, which stand for no text; train on text "
                "(data.corpus=FILE|FOLDER|GLOB), or with the tokenizer of your model (tokenizer.path=FILE)"
            )
        tokenizer = load_tokenizer(checkpoint / TOKENIZER_FILE)
        stored = StoredWeights(checkpoint)
        spec = replace(spec, model=_strip_padding(spec.model, stored.model, tokenizer))
    except (SpecError, DataError, OSError, ValueError) as error:
        raise _load_error(checkpoint, error) from error
    files = stored.companions()
    eos_token_ids = stop_token_ids(files, get_text_config(stored.origin.get("config") or {}), tokenizer)
    around = spec.data.add_special_tokens  # as in the run's training data
    return ModelSource(checkpoint, spec, tokenizer, files, eos_token_ids, add_special_tokens=around)


def _strip_padding(model: ModelSpec, stored: ModelSpec, tokenizer: Tokenizer) -> ModelSpec:
    """Cut vocab_size down to real tokens: of the weights that the run started from, and of the tokenizer."""
    known = max(stored.vocab_size or 0, tokenizer.vocab_size)
    return replace(model, vocab_size=min(model.vocab_size or known, known))


def _load_error(checkpoint: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"no text can be generated from {checkpoint}: {error}")


def _inference_dtype(spec: RunSpec, device: torch.device) -> torch.dtype:
    platform = platform_of(device)
    if not platform.has_streams:
        return torch.float32
    if spec.precision.compute_dtype == "auto":
        # Weights that were never launched as a run: resolve it as a launch does.
        return torch.bfloat16 if torch.bfloat16 in platform.autocast_dtypes() else torch.float32
    from megalaunch.engine.precision.policy import compute_dtype  # imported late: FSDP2's import takes a second

    return compute_dtype(spec.precision)


def _decoder(checkpoint: Path, spec: RunSpec, dtype: torch.dtype, device: torch.device) -> Decoder:
    with torch.device("meta"), build_for(device):
        wide = spec.precision.residual_dtype == "fp32" and dtype != torch.float32
        decoder = build_decoder(spec.model, block_dtype=dtype if wide else None)
    shapes = {name: tensor.shape for name, tensor in (*decoder.named_parameters(), *decoder.named_buffers())}
    weights = read_tensors(checkpoint, [WEIGHTS + name for name in shapes])
    for name, shape in shapes.items():
        stored = weights[WEIGHTS + name]
        if name in VOCAB_PARALLEL_PARAMS:
            stored = weights[WEIGHTS + name] = stored[: shape[0]]
        if stored.shape != shape:
            raise ValueError(f"{name} has shape {list(stored.shape)}, but {SPEC_FILE} needs {list(shape)}")
    kept = dict(decoder.named_buffers())
    placed = {
        name: weights.pop(WEIGHTS + name).to(device, kept[name].dtype if name in kept else dtype) for name in shapes
    }
    decoder.load_state_dict(placed, strict=False, assign=True)  # not strict: a tied head has no tensor of its own
    decoder.tie()
    return fuse_projections(decoder.eval())
