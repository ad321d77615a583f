"""Decode steps as graphs: replayed on fixed shapes they give what eager steps give, and read nothing on the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from emulated_graphs import EmulatedGraphs
from tiny_run import tiny_decoder

from megalaunch.engine.inference import decode_graph
from megalaunch.engine.inference.decode_graph import DecodeGraph, can_capture
from megalaunch.engine.inference.fuse_projections import fuse_projections
from megalaunch.engine.inference.generate import GenerationConfig, generate_tokens, next_logits
from megalaunch.engine.inference.kv_cache import KVCache
from megalaunch.engine.inference.sampling import Sampling
from megalaunch.engine.platform.registry import get_platform
from megalaunch.kernels.forms import KernelForms, use_kernel_forms
from megalaunch.kernels.rms_norm import rms_norm_reference

PROMPTS = [[5, 6, 7], [90, 4, 200], [11], [250, 3, 3, 8, 40, 41, 42]]
MLA = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
MODELS = {
    "llama": {},
    "windows": {"sliding_window": 3},
    "soft caps": {"sliding_window": 3, "attn_logit_softcapping": 2.0, "qk_norm": "full"},
    "output gates": {"attention_output_gate": True},
    "gpt": {"position_embedding": "learned", "norm": "layernorm", "mlp_bias": True, "qkv_bias": True},
    "latent": {"mla": MLA, "num_query_groups": 4, "head_dim": 12},
}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> EmulatedGraphs:
    """The CPU's platform with emulated graphs, with the forms of a GPU and a border at every 4th slot."""
    platform = EmulatedGraphs(get_platform("cpu").facts)
    monkeypatch.setattr(decode_graph, "platform_of", lambda device: platform)
    monkeypatch.setattr(decode_graph, "BORDER", 4)
    return platform


@pytest.fixture(autouse=True)
def _forms_of_a_gpu():
    with use_kernel_forms(KernelForms(on_cpu=False, rms_norm=rms_norm_reference)):
        yield


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS[:2], PROMPTS], ids=["one", "two", "padded"])
@pytest.mark.parametrize("model", MODELS)
def test_replayed_steps_are_eager_steps(graphs: EmulatedGraphs, model: str, prompts: list[list[int]]):
    """Logits of ten steps, over three borders, and with memory of NaN behind the filled slots."""
    decoder = fuse_projections(tiny_decoder(**MODELS[model]))
    longest = max(map(len, prompts))
    starts = [longest - len(prompt) for prompt in prompts]
    tokens = torch.tensor([[0] * start + prompt for start, prompt in zip(starts, prompts, strict=True)])
    more = torch.randint(0, 300, (len(prompts), 10), generator=torch.Generator().manual_seed(2))
    eager, captured = (KVCache(decoder.config.num_layers, longest + 10, starts) for _ in range(2))
    for cache in (eager, captured):
        next_logits(decoder, tokens, cache)
    with torch.inference_mode():
        for buffer in (buffer for layer in captured.layers for buffer in layer._buffers):
            buffer[:, :, longest:] = torch.nan
    graph = DecodeGraph(decoder, captured)
    for step in range(10):
        expected = next_logits(decoder, more[:, step, None], eager)
        torch.testing.assert_close(graph.next_logits(more[:, step, None]), expected, rtol=1e-5, atol=1e-5)
    steps = Counter((longest + step) // 4 for step in range(10))  # between two borders: the first one runs eagerly
    assert (graphs.captured, graphs.replayed) == (sum(n > 1 for n in steps.values()), 10 - len(steps))
    with pytest.raises(ValueError, match=f"the cache holds {longest + 10} positions, one more is asked for"):
        graph.next_logits(more[:, :1])


def test_texts_are_the_same_and_eager_captures_nothing(graphs: EmulatedGraphs):
    decoder = tiny_decoder()

    def texts(config: GenerationConfig) -> list[list[int]]:
        return [drawn.tokens_B.tolist() for drawn in generate_tokens(decoder, PROMPTS, config)]

    config = GenerationConfig(12, Sampling(seed=5))
    eager = texts(replace(config, eager=True))
    assert graphs.captured == 0
    assert texts(config) == eager
    assert graphs.replayed > 0


def test_what_cannot_be_captured_is_computed_step_by_step(graphs: EmulatedGraphs):
    moe = {"num_experts": 4, "ffn_hidden_size": 24}
    assert can_capture(tiny_decoder())
    assert not can_capture(tiny_decoder(moe=moe))
    assert len(list(generate_tokens(tiny_decoder(moe=moe), PROMPTS, GenerationConfig(6, Sampling())))) == 6
    assert graphs.captured == 0


def test_a_device_without_graphs_computes_step_by_step(monkeypatch: pytest.MonkeyPatch):
    assert not can_capture(tiny_decoder())
