"""Generation: the cache changes nothing, tokens are drawn as asked, text comes out whole."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_run import make_run, tiny_decoder, tiny_tokenizer

from megalaunch.engine import api
from megalaunch.engine.checkpoint.export_huggingface import StoredWeights
from megalaunch.engine.checkpoint.store import CheckpointError
from megalaunch.engine.inference.detokenizer import StopStrings, detokenize_stream
from megalaunch.engine.inference.fuse_projections import FusedLinear, fuse_projections
from megalaunch.engine.inference.generate import GenerationConfig, generate_tokens, next_logits
from megalaunch.engine.inference.kv_cache import KVCache
from megalaunch.engine.inference.sampling import Sampler, Sampling, sampling_probs
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.param_layout import COLUMN_PARALLEL

GREEDY = Sampling(temperature=0)


def cache_for(model, capacity: int, starts=()):
    return KVCache(model.config.num_layers, capacity, starts)


def rows_of(model, prompts, count: int, sampling: Sampling, samples=None, **writing) -> list[list[int]]:
    """What each row writes."""
    asked = GenerationConfig(count, sampling, **writing)
    return torch.stack([drawn.tokens_B for drawn in generate_tokens(model, prompts, asked, samples)], dim=1).tolist()


PROMPTS = [[5, 6, 7], [90, 4, 200], [11], [250, 3, 3, 8, 40, 41, 42]]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cuts", [[1] * 12, [12], [5, 1, 1, 5], [3, 4, 5]])
def test_the_cache_gives_the_logits_of_a_whole_pass(cuts: list[int], fused: bool):
    model = tiny_decoder()
    tokens = torch.randint(0, 300, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model(tokens)
    writer = fuse_projections(model) if fused else model
    cache, start = cache_for(model, 12), 0
    for size in cuts:
        logits = next_logits(writer, tokens[:, start : start + size], cache)
        start += size
        torch.testing.assert_close(logits, whole[:, start - 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"sliding_window": 3},
        {"sliding_window": 3, "attn_logit_softcapping": 2.0, "qk_norm": "full"},
        {"position_embedding": "learned", "norm": "layernorm", "mlp_bias": True, "qkv_bias": True},
        {"attention_output_gate": True, "qk_norm": "head", "qkv_bias": True},
        {"moe": {"num_experts": 4, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16, "shared_expert_gate": True}},
    ],
)
def test_prompts_of_different_lengths_are_what_they_are_alone(shape: dict, fused: bool):
    """Logits to rounding, past the window."""
    model = tiny_decoder(**shape)
    longest = max(map(len, PROMPTS))
    starts = [longest - len(prompt) for prompt in PROMPTS]
    padded = torch.tensor([[0] * start + prompt for start, prompt in zip(starts, PROMPTS, strict=True)])
    more = torch.randint(0, 300, (len(PROMPTS), 4), generator=torch.Generator().manual_seed(2))
    writer = fuse_projections(model) if fused else model
    cache = cache_for(model, longest + 4, starts)
    found = [next_logits(writer, padded, cache)]
    found += [next_logits(writer, more[:, place : place + 1], cache) for place in range(4)]
    for row, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            alone = model(torch.cat((torch.tensor(prompt), more[row]))[None])[0, len(prompt) - 1 :]
        torch.testing.assert_close(torch.stack([logits[row] for logits in found]), alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 8, 24, 25])
@pytest.mark.parametrize("features", [(40,), (96, 192), (96, 105)])
def test_fused_projections_equal_each_projection_by_itself(features: tuple[int, ...], rows: int):
    """One row, few rows by blocks (with features left over and without), and many."""
    torch.manual_seed(rows)
    for bias in (False, True):
        projections = [Linear(32, size, COLUMN_PARALLEL, bias) for size in features]
        for parameter in (p for projection in projections for p in projection.parameters()):
            parameter.data.normal_()
        x = torch.randn(rows, 32)
        with torch.no_grad():
            expected = torch.cat([projection(x) for projection in projections], dim=1)
            fused = FusedLinear(*projections)
            torch.testing.assert_close(fused(x), expected, rtol=1e-5, atol=1e-5)


def test_fused_parameters_are_those_of_the_decoder():
    """Changed in place before the first token."""
    plain, fused = tiny_decoder(tie_word_embeddings=True), fuse_projections(tiny_decoder(tie_word_embeddings=True))
    assert fused.state_dict().keys() == plain.state_dict().keys()
    assert fused.head.weight is fused.embedding.weight
    tokens = torch.tensor([PROMPTS[3]] * 3)
    with torch.no_grad():
        for model in (plain, fused):
            model.layers["1"].mlp.up_proj.weight.mul_(2)
            model.embedding.weight.mul_(0.5)
        expected = plain(tokens)
    for rows in (1, 3):
        cache = cache_for(fused, 7)
        found = torch.stack([next_logits(fused, tokens[:rows, place, None], cache) for place in range(7)], dim=1)
        torch.testing.assert_close(found, expected[:rows], rtol=1e-5, atol=1e-5)


def test_fused_projections_leave_gradients_and_several_positions_alone():
    plain, fused = tiny_decoder(), fuse_projections(tiny_decoder())
    tokens = torch.randint(0, 300, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(fused(tokens), plain(tokens))
    for model in (plain, fused):
        for some in (tokens[:, :5], tokens[:, :1]):
            model(some).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert all(torch.equal(parameter.grad, gradients[name]) for name, parameter in fused.named_parameters())


@pytest.mark.parametrize(("usable", "packed"), [(2**36, True), (2**10, False)])
def test_weights_are_packed_where_memory_allows(monkeypatch, usable: int, packed: bool):
    monkeypatch.setattr("megalaunch.engine.inference.fuse_projections.usable_memory", lambda: usable)
    model = fuse_projections(tiny_decoder())
    with torch.profiler.profile() as profile:
        next_logits(model, torch.tensor([[5], [6], [7]]), cache_for(model, 1))
    operators = {event.name for event in profile.events()}
    assert ("mkldnn::_linear_pointwise" in operators) == packed


def test_the_cache_refuses_what_does_not_fit():
    model = tiny_decoder()
    with pytest.raises(ValueError, match="the cache holds 4 positions, 5 are asked for"):
        next_logits(model, torch.zeros(1, 5, dtype=torch.int64), cache_for(model, 4))


def test_greedy_takes_what_repeated_whole_passes_take():
    model = tiny_decoder()
    prompts = torch.tensor([[5, 6, 7], [90, 4, 200]])
    expected = prompts
    for _ in range(20):
        with torch.no_grad():
            expected = torch.cat([expected, model(expected)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert rows_of(model, prompts.tolist(), 20, GREEDY) == expected[:, 3:].tolist()


def test_a_batch_of_eight_is_eight_singles():
    """Greedy and drawn, of any lengths, in any order, whatever sample of its prompt a row is."""
    model = fuse_projections(tiny_decoder())
    prompts = PROMPTS + [[*prompt[::-1], 9] for prompt in PROMPTS]
    for sampling in (GREEDY, Sampling(temperature=1.0, seed=3, repetition_penalty=1.3)):
        together = rows_of(model, prompts, 15, sampling, samples=[0, 1] * 4)
        for row, prompt in enumerate(prompts):
            assert rows_of(model, [prompt], 15, sampling, samples=[row % 2]) == [together[row]]
        assert rows_of(model, prompts[::-1], 15, sampling, samples=[1, 0] * 4) == together[::-1]


def test_a_seed_and_a_sample_decide_the_text():
    model = tiny_decoder()

    def drawn(seed: int, sample: int = 0) -> list[list[int]]:
        return rows_of(model, [[5, 6, 7]], 30, Sampling(temperature=1.0, seed=seed), [sample])

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert drawn(1, 1) not in (drawn(1), drawn(2))


def test_it_stops_when_every_row_has_ended():
    model, prompts = tiny_decoder(), PROMPTS[:2]
    free = rows_of(model, prompts, 10, GREEDY)
    end = free[0][2]
    first = [row.index(end) if end in row else 99 for row in free]
    drawn = rows_of(model, prompts, 10, GREEDY, eos_token_ids=frozenset({end, 299}))
    assert len(drawn[0]) == min(10, max(first) + 1)
    assert drawn[0][: first[0] + 1] == free[0][: first[0] + 1]
    assert drawn[1] == free[1][: len(drawn[1])]
    assert len(rows_of(model, prompts[:1], 10, GREEDY, eos_token_ids=frozenset({end}))[0]) == first[0] + 1


def test_the_caller_may_end_rows():
    ended = [False, True]
    for number, _ in enumerate(generate_tokens(tiny_decoder(), PROMPTS[:2], GenerationConfig(10, GREEDY), ended=ended)):
        ended[0] = number == 3
    assert number == 3


def test_ids_that_no_tokenizer_knows_are_never_written():
    model = tiny_decoder()
    with torch.no_grad():
        model.head.weight[250:] *= 50  # the likeliest by far, were they allowed
    for sampling in (GREEDY, Sampling(temperature=2.0)):
        assert max(rows_of(model, [[5]], 30, sampling, vocab_size=250)[0]) < 250
    assert max(rows_of(model, [[5]], 30, GREEDY)[0]) >= 250


def test_log_probabilities_are_the_models_own():
    model = tiny_decoder()
    sampling = Sampling(temperature=0.3, top_k=5, repetition_penalty=2.0, seed=4)
    text = list(PROMPTS[0])
    for drawn in generate_tokens(model, [text[:3]], GenerationConfig(8, sampling, logprobs=3)):
        with torch.no_grad():
            expected = model(torch.tensor([text]))[0, -1].log_softmax(-1)
        token = int(drawn.tokens_B[0])
        chosen_B, ids_Bn, top_Bn = drawn.logprobs
        torch.testing.assert_close(chosen_B[0], expected[token], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(top_Bn[0], expected.topk(3).values, rtol=1e-4, atol=1e-4)
        assert ids_Bn[0].tolist() == expected.topk(3).indices.tolist()
        text.append(token)


def test_a_penalty_and_filters_are_those_of_transformers():
    transformers = pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(5)) * 3
    prompts = [[1, 2, 2], [3, 30, 31], [0, 39, 7]]
    theirs = transformers.LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(1.7),
            transformers.TemperatureLogitsWarper(0.7),
            transformers.TopKLogitsWarper(12),
            transformers.TopPLogitsWarper(0.8),
            transformers.MinPLogitsWarper(0.1),
        ]
    )
    expected = theirs(torch.tensor(prompts), logits.clone()).softmax(-1)
    sampling = Sampling(temperature=0.7, top_k=12, top_p=0.8, min_p=0.1, repetition_penalty=1.7)
    found = sampling_probs(Sampler(sampling, prompts, [0, 0, 0]).apply_repetition_penalty(logits), sampling)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert 3 < (found > 0).sum() < 36


LOGITS = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]]).log()


@pytest.mark.parametrize(
    ("sampling", "first", "second"),
    [
        (Sampling(temperature=1.0), [0.1, 0.4, 0.2, 0.3], [0.25] * 4),
        (Sampling(temperature=0.5), [1 / 30, 16 / 30, 4 / 30, 9 / 30], [0.25] * 4),
        (Sampling(temperature=1.0, top_k=2), [0, 4 / 7, 0, 3 / 7], [0.5, 0.5, 0, 0]),
        (Sampling(temperature=1.0, top_k=1), [0, 1, 0, 0], [1, 0, 0, 0]),
        (Sampling(temperature=1.0, top_k=9), [0.1, 0.4, 0.2, 0.3], [0.25] * 4),
        (Sampling(temperature=1.0, top_p=0.35), [0, 1, 0, 0], [0.5, 0.5, 0, 0]),
        (Sampling(temperature=1.0, top_p=0.65), [0, 4 / 7, 0, 3 / 7], [1 / 3, 1 / 3, 1 / 3, 0]),
        (Sampling(temperature=1.0, top_p=0.95), [0.1, 0.4, 0.2, 0.3], [0.25] * 4),
        (Sampling(temperature=1.0, top_p=1e-9), [0, 1, 0, 0], [1, 0, 0, 0]),
        # of the three kept by top-k (4/9, 3/9, 2/9), two hold 7/9 >= 0.7
        (Sampling(temperature=1.0, top_k=3, top_p=0.7), [0, 4 / 7, 0, 3 / 7], [1 / 3, 1 / 3, 1 / 3, 0]),
        (Sampling(temperature=1.0, min_p=0.6), [0, 4 / 7, 0, 3 / 7], [0.25] * 4),
        (Sampling(temperature=1.0, min_p=1.0), [0, 1, 0, 0], [0.25] * 4),
    ],
)
def test_distributions_are_exact(sampling: Sampling, first: list[float], second: list[float]):
    torch.testing.assert_close(
        sampling_probs(LOGITS, sampling), torch.tensor([first, second], dtype=torch.float32), rtol=1e-5, atol=1e-7
    )


def test_top_p_stops_at_the_token_that_reaches_it():
    logits = torch.tensor([[0.0, 0.0, -math.inf, -math.inf]])  # halves, exactly
    assert sampling_probs(logits, Sampling(temperature=1.0, top_p=0.5)).tolist() == [[1, 0, 0, 0]]
    assert sampling_probs(logits, Sampling(temperature=1.0, top_p=0.51)).tolist() == [[0.5, 0.5, 0, 0]]


def test_a_tiny_temperature_is_greedy_and_not_nan():
    logits = torch.tensor([[1e4, 3.0, 1e4 + 8, -1e4]])
    assert sampling_probs(logits, Sampling(temperature=1e-30)).tolist() == [[0, 0, 1, 0]]


def test_draws_follow_the_distribution():
    sampler = Sampler(Sampling(temperature=1.0, top_k=3), [[1]], [0])
    counts = torch.zeros(4)
    for _ in range(4000):
        counts[sampler.next_tokens(LOGITS[:1])] += 1
    expected = torch.tensor([0, 4 / 9, 2 / 9, 3 / 9])
    assert counts[0] == 0
    assert (counts / 4000 - expected).abs().max() < 4 * math.sqrt(0.25 / 4000)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or more, not -0.1"),
        ({"temperature": math.nan}, "temperature must be 0 or more, not nan"),
        ({"temperature": math.inf}, "temperature must be 0 or more, not inf"),
        ({"top_k": 0}, "top-k must be 1 or more, not 0"),
        ({"top_p": 0.0}, "top-p must be over 0 and at most 1, not 0.0"),
        ({"top_p": 1.1}, "top-p must be over 0 and at most 1, not 1.1"),
        ({"top_p": math.nan}, "top-p must be over 0"),
        ({"min_p": 1.5}, "min-p must be from 0 to 1, not 1.5"),
        ({"repetition_penalty": 0.0}, "repetition penalty must be over 0, not 0.0"),
        ({"seed": -1}, "seed must be from 0"),
        ({"seed": 2**63}, "seed must be from 0"),
    ],
)
def test_impossible_settings_are_named(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


def test_characters_are_shown_when_they_are_whole(tmp_path: Path):
    tokenizer, _ = tiny_tokenizer(tmp_path)
    text = "the cat 🐈 sät\u2028näh 中文 �!"
    tokens = tokenizer.encode(text)
    assert len(tokens) > len(text.split())
    for cut in (0, 1, 5, 8):
        if "\ufffd" in tokenizer.decode(tokens[:cut]):
            continue
        pieces = list(detokenize_stream(tokenizer, tokens[:cut], tokens[cut:]))
        assert tokenizer.decode(tokens[:cut]) + "".join(pieces) == text
        assert all(len(piece) == 1 or "\ufffd" not in piece or "�!" in piece for piece in pieces)
        assert len(pieces) > 5
    half = tokenizer.encode("🐈")[:-1]
    assert "".join(detokenize_stream(tokenizer, tokenizer.encode("the"), half)).strip("\ufffd") == ""


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_a_stop_string_ends_the_text_before_it_however_it_comes(size: int):
    text = "one <|en and <|end|> two END"
    for strings, expected in [
        (["<|end|>"], "one <|en and "),
        (["END", " two"], "one <|en and <|end|>"),
        (["nowhere"], text),
        (["o"], ""),
        (["ENDS"], text),
    ]:
        stops, found = StopStrings(strings), ""
        for start in range(0, len(text), size):
            if stops.found is None:
                found += stops.add(text[start : start + size], last=start + size >= len(text))
        assert found == expected
        assert (stops.found is None) == (expected == text)


def test_texts_of_many_prompts_end_each_in_its_own_way(tmp_path: Path):
    model = api.open_model(make_run(tmp_path / "run").root)
    prompts = ["the cat", "the dog lay by", "näh"]

    def written(**request: object) -> list[api.Completion]:
        events = list(
            api.generate_texts(
                model, api.tokenize_prompts(model, prompts), api.GenerationRequest(20, GREEDY, **request)
            )
        )
        records = sorted((event for event in events if isinstance(event, api.Completion)), key=lambda one: one.row)
        for record in records:
            pieces = [event.text for event in events if isinstance(event, api.TextDelta) and event.row == record.row]
            assert "".join(pieces) == record.text
        return records

    free = written(batch_size=2)
    assert [record.finish_reason for record in free] == ["length"] * 3
    assert [record.text for record in free] == [api.generate(tmp_path / "run", one, 20, GREEDY) for one in prompts]
    stop = free[1].text[5:8]
    stopped = written(stop=(stop,), logprobs=0)
    assert (stopped[1].finish_reason, stopped[1].stop) == ("stop", stop)
    assert [record.text for record in stopped] == [record.text.split(stop)[0] for record in free]
    assert len(stopped[1].logprobs) == len(stopped[1].tokens) < 20
    twice = written(num_samples=2, batch_size=4)
    assert [record.text for record in twice] == [record.text for record in free for _ in range(2)]


def test_a_run_directory_means_its_newest_valid_checkpoint(tmp_path: Path):
    run = make_run(tmp_path / "run")
    greedy = {"prompt": "the cat", "max_new_tokens": 12, "sampling": GREEDY}
    newest = api.generate(run.root, **greedy)
    assert newest == api.generate(run.checkpoint(20), **greedy)
    older = api.generate(run.checkpoint(10), **greedy)
    assert older != newest
    shard = run.checkpoint(20) / "shard_00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-9] + b"x" * 9)
    heard: list[str] = []
    assert api.open_model(run.root, heard.append).checkpoint == run.checkpoint(10)
    (message,) = heard
    assert message.startswith(f"{run.checkpoint(20)} is passed over: shard_00000.safetensors: is damaged")
    with pytest.raises(CheckpointError, match=r"step_00000020 is damaged: shard_00000\.safetensors"):
        api.open_model(run.checkpoint(20))


def test_a_checkpoint_needs_nothing_beside_it(tmp_path: Path):
    run = make_run(tmp_path / "run")
    expected = api.generate(run.root, "the", 8, GREEDY)
    alone = run.checkpoint(20).rename(tmp_path / "somewhere")
    assert api.generate(alone, "the", 8, GREEDY) == expected


def test_tied_embeddings_and_an_end_of_the_document(tmp_path: Path):
    run = make_run(tmp_path / "run", tie_word_embeddings=True)
    model = api.open_model(run.root)
    assert model.decoder.head.weight is model.decoder.embedding.weight
    ((first,),) = rows_of(model.decoder, api.tokenize_prompts(model, ["the cat"]), 1, GREEDY)
    model = replace(model, eos_token_ids=frozenset({first}))
    assert list(api.stream_text(model, "the cat", 20, GREEDY)) == []


def test_prompts_that_cannot_be_continued(tmp_path: Path):
    model = api.open_model(make_run(tmp_path / "run", max_position_embeddings=20).root)
    with pytest.raises(ValueError, match="the prompt is empty"):
        api.stream_text(model, "")
    with pytest.raises(ValueError, match=r"of \d tokens and 30 new ones are more than the 20"):
        api.stream_text(model, "the cat", 30)
    assert api.length_note(model, [[1, 2]], 10) is None
    assert "trained on 64 at a time" in (api.length_note(model, [[1, 2]], 100) or "")


@pytest.mark.parametrize(("name", "reason"), [("spec.yaml", "spec.yaml"), ("tokenizer.json", "no such file")])
def test_a_checkpoint_without_its_parts(tmp_path: Path, name: str, reason: str):
    run = make_run(tmp_path / "run", steps=(1,))
    (run.checkpoint(1) / name).unlink()
    from megalaunch.engine.inference.load_model import load_language_model

    with pytest.raises(CheckpointError, match=f"no text can be generated from .*{reason}"):
        load_language_model(run.checkpoint(1), torch.device("cpu"))


def test_a_run_on_mock_tokens_has_no_text(tmp_path: Path):
    run = make_run(tmp_path / "run", steps=(1,))
    spec = run.checkpoint(1) / "spec.yaml"
    spec.write_text(re.sub("mock: .*", "mock: true", spec.read_text()))
    (run.checkpoint(1) / "tokenizer.json").unlink()
    from megalaunch.engine.inference.load_model import load_language_model

    with pytest.raises(CheckpointError, match=r"trained on mock tokens.* train on text \(data\.corpus="):
        load_language_model(run.checkpoint(1), torch.device("cpu"))


def test_weights_of_another_shape_are_refused(tmp_path: Path):
    run = make_run(tmp_path / "run", steps=(1,))
    spec = run.checkpoint(1) / "spec.yaml"
    spec.write_text(spec.read_text().replace("ffn_hidden_size: 48", "ffn_hidden_size: 64"))
    from megalaunch.engine.inference.load_model import load_language_model

    with pytest.raises(CheckpointError, match=r"gate_proj.weight has shape \[48, 32\], but spec.yaml needs"):
        load_language_model(run.checkpoint(1), torch.device("cpu"))


def test_a_small_model_writes_on_one_thread(tmp_path: Path):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        api.set_num_threads_for(api.open_model(make_run(tmp_path / "run", steps=(1,)).root))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_generating_imports_no_trainer():
    """DTensor, FSDP2 and DCP double the time to the first token."""
    heavy = ["torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
    script = f"import sys, megalaunch.engine.api; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.stdout == "[]\n", result.stderr


@pytest.mark.parametrize("origin", [[], 7, {"vocab_size": "x"}, {"vocab_size": 0}, {"vocab_size": 9, "config": [1]}])
def test_an_origin_that_says_nothing_is_named(tmp_path: Path, origin: object):
    checkpoint = make_run(tmp_path / "run", steps=(1,)).checkpoint(1)
    (checkpoint / "origin.json").write_text(json.dumps(origin))
    with pytest.raises(CheckpointError, match=r"origin\.json is damaged: vocab_size must be a positive integer"):
        StoredWeights(checkpoint)
