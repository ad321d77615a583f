"""The text that a model writes when its training is done, on all ranks in step."""

from __future__ import annotations

from pathlib import Path

import torch

from megalaunch.config.schema import RunSpec
from megalaunch.data.tokenizer import load_tokenizer
from megalaunch.engine.inference.generate import generate_tokens
from megalaunch.engine.inference.sampling import Sampling
from megalaunch.engine.inference.text import text_of
from megalaunch.engine.model.decoder import Decoder


def sample_text(spec: RunSpec, model: Decoder) -> str | None:
    """`train.sample_prompt` and what the model adds to it; None when the run asks for no sample.

    Every rank computes the same text, since each pass through a sharded model needs all of them.
    """
    prompt, path = spec.train.sample_prompt, spec.tokenizer.path
    if not prompt or path is None:
        return None
    tokenizer = load_tokenizer(Path(path))
    tokens = tokenizer.encode(prompt)
    room = spec.model.max_position_embeddings - len(tokens)
    drawn = generate_tokens(
        model,
        torch.tensor([tokens]),
        min(spec.train.sample_tokens, room),
        Sampling(seed=spec.train.seed),
        end_id=tokenizer.eod_id,
        vocabulary=tokenizer.vocab_size,
    )
    written = [int(token) for (token,) in drawn]
    return prompt + "".join(text_of(tokenizer, tokens, (t for t in written if t != tokenizer.eod_id)))
