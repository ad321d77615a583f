"""Generation with latent attention: the cache holds the latents alone, and gives the logits of a whole pass."""

from __future__ import annotations

import pytest
import torch
from tiny_run import tiny_decoder

from megalaunch.engine.inference.generate import next_logits
from megalaunch.engine.inference.kv_cache import KVCache

MLA = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
PROMPTS = [[5, 6, 7], [90, 4, 200], [11], [250, 3, 3, 8, 40, 41, 42]]


def _decoder(**mla):
    return tiny_decoder(mla={**MLA, **mla}, num_query_groups=4, head_dim=12)


def _cache(model, capacity: int, starts=()) -> KVCache:
    return KVCache(model.config.num_layers, capacity, starts)


@pytest.mark.parametrize("ranks", [{}, {"q_lora_rank": None, "v_head_dim": 20}])
@pytest.mark.parametrize("cuts", [[1] * 12, [12], [5, 1, 1, 5], [3, 4, 5]])
def test_the_cache_gives_the_logits_of_a_whole_pass(cuts, ranks):
    """A prompt by keys and values of heads, all further tokens by absorbed weights."""
    model = _decoder(**ranks)
    tokens = torch.randint(0, 300, (3, 12), generator=torch.Generator().manual_seed(1))
    cache, start = _cache(model, 12), 0
    with torch.no_grad():
        whole = model(tokens)
        for size in cuts:
            logits = next_logits(model, tokens[:, start : start + size], cache)
            start += size
            torch.testing.assert_close(logits, whole[:, start - 1], rtol=1e-5, atol=1e-5)


def test_prompts_of_different_lengths_are_what_they_are_alone():
    model, longest = _decoder(), max(map(len, PROMPTS))
    starts = [longest - len(prompt) for prompt in PROMPTS]
    padded = torch.tensor([[0] * start + prompt for start, prompt in zip(starts, PROMPTS, strict=True)])
    more = torch.randint(0, 300, (len(PROMPTS), 4), generator=torch.Generator().manual_seed(2))
    cache = _cache(model, longest + 4, starts)
    with torch.no_grad():
        found = [next_logits(model, padded, cache)]
        found += [next_logits(model, more[:, place : place + 1], cache) for place in range(4)]
        for row, prompt in enumerate(PROMPTS):
            alone = model(torch.cat((torch.tensor(prompt), more[row]))[None])[0, len(prompt) - 1 :]
            torch.testing.assert_close(torch.stack([logits[row] for logits in found]), alone, rtol=1e-4, atol=1e-4)


def test_a_token_takes_the_published_numbers():
    """kv_lora_rank + qk_rope_head_dim numbers a token and layer (DeepSeek-V2 report, section 2.1.4)."""
    model, capacity, rows = _decoder(), 10, 3
    cache = _cache(model, capacity)
    next_logits(model, torch.ones(rows, 4, dtype=torch.int64), cache)
    numbers, layers = MLA["kv_lora_rank"] + MLA["qk_rope_head_dim"], range(model.config.num_layers)
    with torch.inference_mode():
        views = [view for layer in layers for view in cache[layer].update(torch.empty(rows, 1, 0, numbers))]
    held = sum(view.untyped_storage().nbytes() for view in views)
    assert held == rows * capacity * model.config.num_layers * numbers * 4
