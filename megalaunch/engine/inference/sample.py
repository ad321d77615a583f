"""The text that a model writes when its training is done, on all ranks in step."""

from __future__ import annotations

import torch

from megalaunch.config.schema import RunSpec
from megalaunch.data.tokenizer import Tokenizer
from megalaunch.engine.inference.generate import TextModel, generate_tokens
from megalaunch.engine.inference.sampling import Sampling
from megalaunch.engine.inference.text import text_of


def sample_text(spec: RunSpec, model: TextModel, tokenizer: Tokenizer) -> str:
    """`train.sample_prompt` and what the model adds to it.

    Every rank computes the same text, since each pass through a sharded model needs all of them. Raises ValueError
    on all of them when the prompt fills the model's context.
    """
    prompt = spec.train.sample_prompt or ""
    tokens, longest = tokenizer.encode(prompt), spec.model.max_position_embeddings
    if not 0 < len(tokens) < longest:
        raise ValueError(
            f"train.sample_prompt has {len(tokens)} tokens, the model is made for {longest} in all "
            "(model.max_position_embeddings)"
        )
    drawn = generate_tokens(
        model,
        torch.tensor([tokens]),
        min(spec.train.sample_tokens, longest - len(tokens)),
        Sampling(seed=spec.train.seed),
        end_id=tokenizer.eod_id,
        vocabulary=tokenizer.vocab_size,
    )
    written = [int(token) for (token,) in drawn]
    return prompt + "".join(text_of(tokenizer, tokens, (t for t in written if t != tokenizer.eod_id)))
