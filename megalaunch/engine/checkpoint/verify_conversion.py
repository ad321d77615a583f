"""Verify a conversion: is config.json read as transformers reads it, and did every tensor arrive?

The first is checked on a shrunk model with the same config.json (verify_config.py), at every size; the second by a
forward pass with the full weights of both sides on the same tokens.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.huggingface import HuggingFaceFolder
from megalaunch.engine.checkpoint.import_transformers import import_transformers
from megalaunch.engine.checkpoint.load_tensors import Read
from megalaunch.engine.checkpoint.streaming_forward import streamed_logits
from megalaunch.engine.checkpoint.verify_config import Verification, require_agreement, verify_config
from megalaunch.schema.model import ModelSpec

TOLERANCE = 1e-4  # relative to the largest logit, or to 1 if that is larger
_ROWS, _LENGTH = 2, 24
# In fp32: memory stays below 2 GB. A larger folder is read by this engine's decoder, layer by layer.
_TRANSFORMERS_BYTES = 1_000_000_000


def verify_logits(
    model: ModelSpec, folder: Path | None, of_folder: Read, of_checkpoint: Read, largest_fault: float = 0.0
) -> dict[str, Any]:
    """Compare the logits of a Hugging Face (or Megatron) model and a checkpoint.

    Args:
        model: the model of both.
        folder: the Hugging Face folder, if there is one. Its config.json is verified against transformers if that is
            installed, and transformers computes its logits if the weights are small enough.
        of_folder: reads a parameter of the foreign side.
        of_checkpoint: reads a parameter of the checkpoint.
        largest_fault: the error that a lower-precision output dtype explains, relative to the largest logit.

    Returns:
        The report for proof.json.

    Raises:
        CheckpointError: the logits differ by more than the tolerance.
    """
    verification = Verification(None, reason="there is no Hugging Face folder that transformers could read")
    if folder is not None:
        verification = verify_config(HuggingFaceFolder(folder).config)
    require_agreement(verification, "nothing was written")
    probe = _random_tokens(model)
    ours = streamed_logits(model, of_checkpoint, probe)
    readable = folder is not None and verification.agrees and not _is_quantized(folder)
    theirs, reader = _reference_logits(model, folder if readable else None, of_folder, probe)
    report = _require_close(ours, theirs, f"; the folder is read by {reader}", largest_fault)
    about = {"reader_of_the_folder": reader, "verified": verification.agrees, "config": asdict(verification)}
    return report | about


def verify_equal_models(model: ModelSpec, read: Read, other: ModelSpec, read_other: Read) -> dict[str, Any]:
    """Compare the logits of a model and another that computes the same; arguments and errors as `verify_logits`."""
    probe = _random_tokens(model)
    return _require_close(streamed_logits(other, read_other, probe), streamed_logits(model, read, probe))


def _random_tokens(model: ModelSpec) -> Tensor:
    generator = torch.Generator().manual_seed(20)
    length = min(_LENGTH, model.max_position_embeddings)
    return torch.randint(0, model.vocab_size or 1, (_ROWS, length), generator=generator)


def _require_close(ours: Tensor, theirs: Tensor, reader: str = "", largest_fault: float = 0.0) -> dict[str, Any]:
    """Return the report of a comparison. Raises CheckpointError if the logits differ by more than the tolerance."""
    difference = (ours - theirs).abs().max().item()
    largest = theirs.abs().max().item()
    allowed = max(TOLERANCE, largest_fault) * max(1.0, largest)
    compared = f"logits of {_ROWS} x {_LENGTH} random tokens, fp32"
    if not difference <= allowed:  # also if it is NaN
        raise CheckpointError(
            f"the models differ: logits by up to {difference:.3g}, the tolerance is {allowed:.3g} "
            f"({compared}{reader}); nothing was written"
        )
    return {"compared": compared, "largest_logit": largest, "largest_difference": difference, "tolerance": allowed}


def _reference_logits(model: ModelSpec, folder: Path | None, read: Read, probe: Tensor) -> tuple[Tensor, str]:
    """Return the foreign side's logits and the name of the software that computed them."""
    if folder is None or _bytes(model) > _TRANSFORMERS_BYTES:
        return streamed_logits(model, read, probe), "megalaunch"
    transformers = import_transformers()
    transformers.utils.logging.disable_progress_bar()
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, trust_remote_code=False
    )
    with torch.no_grad():
        logits: Tensor = reference.eval()(probe).logits.float()
    return logits, f"transformers {transformers.__version__}"


def _is_quantized(folder: Path) -> bool:
    """Return True for quantised weights, which transformers reads on GPUs only."""
    return HuggingFaceFolder(folder).config.get("quantization_config") is not None


def _bytes(model: ModelSpec) -> int:
    """Return the size of the parameters in fp32."""
    from megalaunch.plan.parameters import count_parameters

    return 4 * count_parameters(model).total
