"""The text that a model writes when its training is done, on all ranks in step."""

from __future__ import annotations

from megalaunch.config.schema import RunSpec
from megalaunch.data.tokenizer.tokenizer import Tokenizer
from megalaunch.engine.inference.detokenizer import detokenize_stream
from megalaunch.engine.inference.generate import GenerationConfig, TextModel, generate_tokens
from megalaunch.engine.inference.sampling import Sampling


def sample_text(spec: RunSpec, model: TextModel, tokenizer: Tokenizer) -> str:
    """`train.sample_prompt` and what the model adds to it.

    Every rank computes the same text, since each pass through a sharded model needs all of them. Raises ValueError
    on all of them when the prompt fills the model's context.
    """
    prompt = spec.train.sample_prompt or ""
    tokens, longest = tokenizer.encode(prompt, spec.data.add_special_tokens), spec.model.max_position_embeddings
    if not 0 < len(tokens) < longest:
        raise ValueError(
            f"train.sample_prompt has {len(tokens)} tokens, the model is made for {longest} in all "
            "(model.max_position_embeddings)"
        )
    ends = frozenset(() if tokenizer.eod_id is None else (tokenizer.eod_id,))
    most = min(spec.train.sample_tokens, longest - len(tokens))
    writing = GenerationConfig(most, Sampling(seed=spec.train.seed), ends, tokenizer.vocab_size)
    written = [int(drawn.tokens_B[0]) for drawn in generate_tokens(model, [tokens], writing)]
    return prompt + "".join(detokenize_stream(tokenizer, tokens, (t for t in written if t not in ends)))
