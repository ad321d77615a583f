"""Generation: the cache changes nothing, tokens are drawn as asked, text comes out whole."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_run import make_run, tiny_decoder, tiny_tokenizer

from megalaunch.engine import api
from megalaunch.engine.checkpoint.store import CheckpointError
from megalaunch.engine.inference.cache import make_cache
from megalaunch.engine.inference.generate import generate_tokens, next_logits
from megalaunch.engine.inference.sampling import Sampler, Sampling, distribution
from megalaunch.engine.inference.text import text_of

GREEDY = Sampling(temperature=0)


def cache_for(model, capacity: int):
    return make_cache(model.config.num_layers, capacity)


@pytest.mark.parametrize("cuts", [[1] * 12, [12], [5, 1, 1, 5], [3, 4, 5]])
def test_the_cache_gives_the_logits_of_a_whole_pass(cuts: list[int]):
    model = tiny_decoder()
    tokens = torch.randint(0, 300, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model(tokens)
    cache, start = cache_for(model, 12), 0
    for size in cuts:
        logits = next_logits(model, tokens[:, start : start + size], cache)
        start += size
        torch.testing.assert_close(logits, whole[:, start - 1], rtol=1e-5, atol=1e-5)


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
    drawn = torch.stack(list(generate_tokens(model, prompts, 20, GREEDY)), dim=1)
    assert torch.equal(drawn, expected[:, 3:])


def test_rows_of_a_batch_are_what_they_are_alone():
    model, prompts = tiny_decoder(), torch.tensor([[5, 6, 7], [90, 4, 200]])
    together = torch.stack(list(generate_tokens(model, prompts, 15, Sampling(seed=3))), dim=1)
    for row in range(2):
        alone = generate_tokens(model, prompts[row : row + 1], 15, Sampling(seed=3 + row))
        assert torch.equal(torch.cat(list(alone)), together[row])


def test_a_seed_decides_the_text():
    model, prompts = tiny_decoder(), torch.tensor([[5, 6, 7]])

    def drawn(seed: int) -> list[int]:
        return torch.cat(list(generate_tokens(model, prompts, 30, Sampling(temperature=1.0, seed=seed)))).tolist()

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_it_stops_when_every_row_has_ended():
    model, prompts = tiny_decoder(), torch.tensor([[5, 6, 7], [90, 4, 200]])
    free = torch.stack(list(generate_tokens(model, prompts, 10, GREEDY)), dim=1)
    end = int(free[0, 2])
    first = [row.tolist().index(end) if end in row else 99 for row in free]
    drawn = torch.stack(list(generate_tokens(model, prompts, 10, GREEDY, end_id=end)), dim=1)
    assert drawn.shape[1] == min(10, max(first) + 1)
    assert drawn[0, first[0] :].tolist() == [end] * (drawn.shape[1] - first[0])
    assert drawn[1, : first[1]].tolist() == free[1, : first[1]].tolist()[: drawn.shape[1]]
    alone = list(generate_tokens(model, prompts[:1], 10, GREEDY, end_id=end))
    assert len(alone) == first[0] + 1


def test_ids_that_no_tokenizer_knows_are_never_written():
    model = tiny_decoder()
    with torch.no_grad():
        model.head.weight[250:] *= 50  # the likeliest by far, were they allowed
    hot = Sampling(temperature=2.0)
    for sampling in (GREEDY, hot):
        drawn = torch.cat(list(generate_tokens(model, torch.tensor([[5]]), 30, sampling, vocabulary=250)))
        assert drawn.max() < 250
    assert torch.cat(list(generate_tokens(model, torch.tensor([[5]]), 30, GREEDY))).max() >= 250


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
    ],
)
def test_distributions_are_exact(sampling: Sampling, first: list[float], second: list[float]):
    torch.testing.assert_close(
        distribution(LOGITS, sampling), torch.tensor([first, second], dtype=torch.float32), rtol=1e-5, atol=1e-7
    )


def test_top_p_stops_at_the_token_that_reaches_it():
    logits = torch.tensor([[0.0, 0.0, -math.inf, -math.inf]])  # halves, exactly
    assert distribution(logits, Sampling(temperature=1.0, top_p=0.5)).tolist() == [[1, 0, 0, 0]]
    assert distribution(logits, Sampling(temperature=1.0, top_p=0.51)).tolist() == [[0.5, 0.5, 0, 0]]


def test_a_tiny_temperature_is_greedy_and_not_nan():
    logits = torch.tensor([[1e4, 3.0, 1e4 + 8, -1e4]])
    assert distribution(logits, Sampling(temperature=1e-30)).tolist() == [[0, 0, 1, 0]]


def test_draws_follow_the_distribution():
    sampler = Sampler(Sampling(temperature=1.0, top_k=3), 1)
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
        pieces = list(text_of(tokenizer, tokens[:cut], tokens[cut:]))
        assert tokenizer.decode(tokens[:cut]) + "".join(pieces) == text
        assert all(len(piece) == 1 or "\ufffd" not in piece or "�!" in piece for piece in pieces)
        assert len(pieces) > 5
    half = tokenizer.encode("🐈")[:-1]
    assert "".join(text_of(tokenizer, tokenizer.encode("the"), half)).strip("\ufffd") == ""


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
    with pytest.raises(CheckpointError, match=r"step_00000020 cannot be trusted: shard_00000\.safetensors"):
        api.open_model(run.checkpoint(20))


def test_a_checkpoint_needs_nothing_beside_it(tmp_path: Path):
    run = make_run(tmp_path / "run")
    expected = api.generate(run.root, "the", 8, GREEDY)
    alone = run.checkpoint(20).rename(tmp_path / "somewhere")
    assert api.generate(alone, "the", 8, GREEDY) == expected


def test_tied_embeddings_and_an_end_of_the_document(tmp_path: Path):
    run = make_run(tmp_path / "run", tied_embeddings=True)
    model = api.open_model(run.root)
    assert model.decoder.head.weight is model.decoder.embedding.weight
    first = next(iter(generate_tokens(model.decoder, torch.tensor([model.tokenizer.encode("the cat")]), 1, GREEDY)))
    model.tokenizer.__dict__["eod_id"] = int(first)
    assert list(api.continue_text(model, "the cat", 20, GREEDY)) == []


def test_prompts_that_cannot_be_continued(tmp_path: Path):
    model = api.open_model(make_run(tmp_path / "run", max_position_embeddings=20).root)
    with pytest.raises(ValueError, match="the prompt is empty"):
        api.continue_text(model, "")
    with pytest.raises(ValueError, match=r"of \d tokens and 30 new ones are more than the 20"):
        api.continue_text(model, "the cat", 30)
    assert api.length_note(model, "the cat", 10) is None
    assert "trained on 64 at a time" in (api.length_note(model, "the cat", 100) or "")


@pytest.mark.parametrize(("name", "reason"), [("spec.yaml", "spec.yaml"), ("tokenizer.json", "no such file")])
def test_a_checkpoint_without_its_parts(tmp_path: Path, name: str, reason: str):
    run = make_run(tmp_path / "run", steps=(1,))
    (run.checkpoint(1) / name).unlink()
    from megalaunch.engine.inference.load import load_language_model

    with pytest.raises(CheckpointError, match=f"no text can be generated from .*{reason}"):
        load_language_model(run.checkpoint(1), torch.device("cpu"))


def test_weights_of_another_shape_are_refused(tmp_path: Path):
    run = make_run(tmp_path / "run", steps=(1,))
    spec = run.checkpoint(1) / "spec.yaml"
    spec.write_text(spec.read_text().replace("ffn_hidden_size: 48", "ffn_hidden_size: 64"))
    from megalaunch.engine.inference.load import load_language_model

    with pytest.raises(CheckpointError, match=r"gate_proj.weight has the shape \[48, 32\] there; spec.yaml means"):
        load_language_model(run.checkpoint(1), torch.device("cpu"))


def test_a_small_model_writes_on_one_thread(tmp_path: Path):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        api.fit_threads(api.open_model(make_run(tmp_path / "run", steps=(1,)).root))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_generating_imports_no_trainer():
    """DTensor, FSDP2 and DCP double the time until the first word."""
    heavy = ["torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
    script = f"import sys, megalaunch.engine.api; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.stdout == "[]\n", result.stderr
