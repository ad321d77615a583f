"""Dropout on one process: rates, independence of masks, where they are applied, and that evaluation has none."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from tiny_run import tiny_decoder

from megalaunch.engine.model.attention import online_softmax
from megalaunch.engine.model.attention.mask import AttentionMask, make_mask
from megalaunch.engine.model.attention.online_softmax import attention
from megalaunch.engine.model.attention.score_mod import ScoreMod, softcap
from megalaunch.engine.model.dropout import (
    DropoutMask,
    TokenPlaces,
    hash_ids,
    keep_mask,
    make_dropout_masks,
    mix_seed,
    sample_seeds,
)
from megalaunch.engine.model.tp_region import NO_TP

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 300, (3, 24), generator=torch.Generator().manual_seed(3))
SIZE = 512


def table(rate: float, *path: int) -> torch.Tensor:
    """The mask of one site, [SIZE, SIZE]: sample, then site."""
    seeds = mix_seed(sample_seeds(7, [path[0]], CPU), torch.tensor(path[1]))
    return keep_mask(mix_seed(seeds, torch.arange(SIZE)), hash_ids(torch.arange(SIZE)), rate)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_rate_is_kept_in_all_in_each_row_and_in_each_column(rate):
    mask = table(rate, 0, 1).double()
    spread = (rate * (1 - rate)) ** 0.5
    assert abs(mask.mean() - (1 - rate)) < 4 * spread / SIZE
    for dim in (0, 1):
        means = (mask.mean(dim) - (1 - rate)) / (spread / SIZE**0.5)  # of a normal distribution
        assert means.abs().max() < 6
        assert 0.8 < means.std() < 1.2


def test_masks_tell_nothing_of_each_other():
    first = table(0.3, 0, 1).double()
    others = {
        "site": table(0.3, 0, 2),
        "sample": table(0.3, 1, 1),
        "next token": table(0.3, 0, 1).roll(1, 0),
        "next feature": table(0.3, 0, 1).roll(1, 1),
        "far feature": table(0.3, 0, 1).roll(64, 1),
        "transposed": table(0.3, 0, 1).T,
    }
    for name, other in others.items():
        correlation = torch.corrcoef(torch.stack((first.flatten(), other.double().flatten())))[0, 1]
        assert abs(correlation) < 4 / SIZE, name


def test_no_stream_is_anothers():
    seeds = torch.cat([sample_seeds(seed, range(200), CPU) for seed in (0, 1)])
    assert len(seeds.unique()) == 400
    assert sample_seeds(5, [8, 9], CPU).tolist() == [*sample_seeds(5, [8], CPU), *sample_seeds(5, [9], CPU)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rest_is_as_large_as_torch_makes_it(dtype):
    x = torch.randn(2, 64, 96, dtype=dtype, requires_grad=True)
    rows = mix_seed(sample_seeds(1, [4, 5], CPU)[:, None], torch.arange(64))
    out = DropoutMask(rows, hash_ids(torch.arange(96)), 0.25)(x)
    mask = out != 0
    assert torch.equal(out, torch.where(mask, x * (1 / 0.75), 0).to(dtype))
    theirs = torch.nn.functional.dropout(x.detach(), 0.25)
    both = mask & (theirs != 0)
    torch.testing.assert_close(out[both], theirs[both], rtol=2**-7, atol=0)  # torch rounds the factor in bf16
    gradient = torch.randn_like(x)
    out.backward(gradient)
    assert torch.equal(x.grad, torch.where(mask, gradient * (1 / 0.75), 0).to(dtype))


def naive(q, k, v, attention_mask: AttentionMask, scoring: ScoreMod) -> torch.Tensor:
    """Attention written out, all of it kept by autograd."""
    share = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(share, 1).mT * q.shape[-1] ** -0.5
    scores = scores if scoring.soft_cap is None else softcap(scores, scoring.soft_cap)
    scores = scores.masked_fill(~attention_mask.allowed, -torch.inf)
    if scoring.sinks is not None:
        scores = torch.cat((scores, scoring.sinks[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    mask = scoring.dropout_mask(attention_mask)
    weights = weights if mask is None else weights * mask / (1 - scoring.dropout)
    return weights @ v.repeat_interleave(share, 1)


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize("seen", ["causal", "window", "documents"])
def test_attention_by_blocks_is_attention(cap, sinks, rate, seen, monkeypatch):
    monkeypatch.setattr(online_softmax, "QUERIES", 5)
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, n, 13, 8, generator=draw) for n in (4, 2, 2, 4))
    positions = torch.arange(13)
    documents = torch.tensor([0] * 6 + [1] * 7).expand(2, -1)
    attention_mask = AttentionMask(positions, positions, window=4 if seen == "window" else None)
    attention_mask = make_mask(positions, positions, documents, documents) if seen == "documents" else attention_mask
    sink = torch.randn(4, generator=draw) if sinks else None
    seeds = sample_seeds(0, range(8), CPU).view(2, 4) if rate else None
    if cap is None and sink is None and seeds is None:
        return  # torch's own
    found = []
    for attend in (attention, naive):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, *(() if sink is None else (sink,)))]
        scoring = ScoreMod(None, cap, leaves[3] if sinks else None, seeds, rate)
        out = attend(*leaves[:3], attention_mask, scoring)
        out.backward(dout)
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


def test_evaluation_drops_nothing():
    plain, dropping = tiny_decoder(), tiny_decoder(hidden_dropout=0.5, attention_dropout=0.5)
    assert torch.equal(plain(TOKENS), dropping(TOKENS))
    drawn = dropping(TOKENS, seeds_B=sample_seeds(0, range(3), CPU))
    assert (drawn - plain(TOKENS)).abs().max() > 0.1
    assert torch.equal(plain(TOKENS, seeds_B=sample_seeds(0, range(3), CPU)), plain(TOKENS))


@pytest.mark.parametrize("only", ["hidden_dropout", "attention_dropout"])
def test_each_alone(only):
    dropping = tiny_decoder(**{only: 0.3})
    streams = sample_seeds(0, range(3), CPU)
    first = dropping(TOKENS, seeds_B=streams)
    assert torch.equal(first, dropping(TOKENS, seeds_B=streams))
    assert (first - dropping(TOKENS)).abs().max() > 0.01
    other = dropping(TOKENS, seeds_B=sample_seeds(0, [3, 1, 2], CPU))
    assert [torch.equal(a, b) for a, b in zip(first, other, strict=True)] == [False, True, True]


def test_masks_are_applied_where_gpt2_applies_them(monkeypatch):
    """GPT-2 of transformers in training, its dropout replaced by ours in the order in which it calls it."""
    transformers = pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")
    from megalaunch.engine.model.build import build_decoder
    from megalaunch.engine.model.init import init_weights
    from megalaunch.importers.huggingface.gpt import FAMILY
    from megalaunch.importers.huggingface.registry import from_hf_config

    rates = {"resid_pdrop": 0.3, "embd_pdrop": 0.15, "attn_pdrop": 0.2}
    shape = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24, "initializer_range": 0.3}
    config = transformers.GPT2Config(**shape, **rates, bos_token_id=0, eos_token_id=0)
    model = from_hf_config(config.to_dict(), "made up")
    assert (model.hidden_dropout, model.embedding_dropout, model.attention_dropout) == (0.3, 0.15, 0.2)
    written = FAMILY.write(replace(model, hidden_dropout=0.4, attention_dropout=0.1))
    assert [written[key] for key in rates] == [0.4, 0.15, 0.1]

    ours, theirs = (
        build_decoder(model),
        transformers.GPT2LMHeadModel._from_config(config, attn_implementation="eager").train(),
    )
    init_weights(ours, 0)
    _copy(ours, theirs)
    streams, positions = sample_seeds(0, range(3), CPU), torch.arange(24)
    drops = make_dropout_masks(ours.config, NO_TP, streams, TokenPlaces(positions), list(ours.layers))
    layers = drops.layers.values()

    def weights(seeds):
        scoring = ScoreMod(dropout_seeds=seeds, dropout=0.2)
        return lambda x: x * scoring.dropout_mask(AttentionMask(positions, positions)) / 0.8

    each = [(weights(layer.attention_seeds), layer.attention_output, layer.mlp_output) for layer in layers]
    calls = iter([drops.embedding, *itertools.chain(*each)])
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, *_, **__: next(calls)(x))
    expected = theirs(TOKENS).logits
    torch.testing.assert_close(ours(TOKENS, seeds_B=streams), expected, rtol=1e-4, atol=1e-4)
    assert next(calls, None) is None


def _copy(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Our weights into transformers' GPT-2, which keeps matrices as [in, out]."""
    state = dict(ours.named_parameters())
    transformer = theirs.transformer
    with torch.no_grad():
        transformer.wte.weight.copy_(state["embedding.weight"])
        transformer.wpe.weight.copy_(state["embedding.positions"])
        for index, block in enumerate(transformer.h):
            name = f"layers.{index}."
            fused = torch.cat([state[f"{name}attention.{part}_proj.weight"] for part in "qkv"])
            block.attn.c_attn.weight.copy_(fused.T)
            block.attn.c_proj.weight.copy_(state[f"{name}attention.o_proj.weight"].T)
            block.mlp.c_fc.weight.copy_(state[f"{name}mlp.up_proj.weight"].T)
            block.mlp.c_proj.weight.copy_(state[f"{name}mlp.down_proj.weight"].T)
