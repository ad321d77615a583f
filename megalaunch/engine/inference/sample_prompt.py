"""Sample text from a model at the end of training, collectively on all ranks."""

from __future__ import annotations

from megalaunch.data.tokenizer.tokenizer import Tokenizer
from megalaunch.engine.inference.detokenizer import detokenize_stream
from megalaunch.engine.inference.generate import GenerationConfig, TextModel, generate_tokens
from megalaunch.engine.inference.sampling import Sampling
from megalaunch.schema import RunSpec


def sample_text(spec: RunSpec, model: TextModel, tokenizer: Tokenizer) -> str:
    """Return `train.sample_prompt` with the model's continuation.

    Call it on every rank: each forward pass of a sharded model is collective. All ranks return the same text.

    Raises:
        ValueError: The prompt is empty or fills the model's context; raised on all ranks.
    """
    prompt = spec.train.sample_prompt or ""
    tokens, longest = tokenizer.encode(prompt, spec.data.add_special_tokens), spec.model.max_position_embeddings
    if not 0 < len(tokens) < longest:
        raise ValueError(
            f"train.sample_prompt has {len(tokens)} tokens, the model is made for {longest} in all "
            "(model.max_position_embeddings)"
        )
    eos_token_ids = frozenset(() if tokenizer.eod_id is None else (tokenizer.eod_id,))
    most = min(spec.train.sample_tokens, longest - len(tokens))
    config = GenerationConfig(most, Sampling(seed=spec.train.seed), eos_token_ids, tokenizer.vocab_size)
    written = [int(drawn.tokens_B[0]) for drawn in generate_tokens(model, [tokens], config)]
    return prompt + "".join(detokenize_stream(tokenizer, tokens, (t for t in written if t not in eos_token_ids)))
