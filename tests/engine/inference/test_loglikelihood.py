"""Log-probabilities of tokens after others are those of one pass over each pair by itself, and of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_variants import VOCABULARY, make
from tiny_run import tiny_decoder, tiny_tokenizer

from megalaunch.engine.inference import load_model
from megalaunch.engine.inference.load_model import open_model
from megalaunch.engine.inference.loglikelihood import LogLikelihood, loglikelihoods
from megalaunch.engine.platform.platform import Platform
from megalaunch.platform.platforms import PLATFORMS

LONGEST = 12


def drawn_pairs(vocabulary: int) -> list[tuple[list[int], list[int]]]:
    """Pairs of all lengths up to the longest, some that differ in the last token alone, and one that is too long."""
    draw = torch.Generator().manual_seed(5)

    def some(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=draw).tolist()

    pairs = [(some(before), some(after)) for before, after in [(1, 1), (4, 3), (2, 10), (7, 2), (1, 12), (30, 5)]]
    before, after = pairs[1]
    return [*pairs, *((before, [*after[:-1], last]) for last in (3, 4)), ([*before, after[0]], after[1:])]


def by_itself(logits_SV: torch.Tensor, after: list[int]) -> tuple[float, bool]:
    """Of logits of all but the last token of a pair."""
    places_CV = logits_SV[-len(after) :].log_softmax(-1)
    chosen = places_CV[torch.arange(len(after)), torch.tensor(after)].sum()
    return float(chosen), places_CV.argmax(-1).tolist() == after


def check(found: dict[int, LogLikelihood], logits_of, pairs: list[tuple[list[int], list[int]]]) -> None:
    assert sorted(found) == list(range(len(pairs)))
    for number, (before, after) in enumerate(pairs):
        row = [*before, *after][-LONGEST - 1 : -1]
        logprob, greedy = by_itself(logits_of(torch.tensor([row]))[0], after)
        assert found[number] == (pytest.approx(logprob, abs=1e-4), greedy)


@pytest.mark.parametrize("batch_size", [1, 3, 50])
def test_pairs_in_any_company(batch_size):
    model = tiny_decoder()
    pairs = drawn_pairs(300)
    with torch.no_grad():
        likeliest = [int(model(torch.tensor([before[-LONGEST:]]))[0, -1].argmax()) for before, _ in pairs]
        pairs += [(before, [token]) for (before, _), token in zip(pairs, likeliest, strict=True)]
        found = dict(loglikelihoods(model, pairs, batch_size, LONGEST))
        check(found, model, pairs)
    assert sum(one.greedy for one in found.values()) >= len(likeliest)


def test_pairs_that_differ_in_the_last_token_are_read_once(monkeypatch):
    model, read = tiny_decoder(), []
    monkeypatch.setattr(model, "forward", lambda tokens_BS, logits: read.append(len(tokens_BS)) or _states(tokens_BS))
    assert len(list(loglikelihoods(model, [([5, 6], [7, last]) for last in range(9)], 4, LONGEST))) == 9
    assert read == [1]


def _states(tokens_BS: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*tokens_BS.shape, 32)


def test_pairs_that_cannot_be():
    for before, after, longest, reason in [
        ([], [1], 4, "no token before"),
        ([1], [], 4, "no token after"),
        ([1], [1] * 5, 4, "the continuation of pair 0 has 5 tokens, more than the 4"),
    ]:
        with pytest.raises(ValueError, match=reason):
            list(loglikelihoods(tiny_decoder(), [(before, after)], 1, longest))


@pytest.mark.parametrize("family", ["llama 3.2", "gemma2"])
def test_they_are_those_of_transformers(family: str, tmp_path: Path):
    pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")
    theirs = make(family, tmp_path / "hf")
    tiny_tokenizer(tmp_path)[1].rename(tmp_path / "hf" / "tokenizer.json")
    model = open_model(tmp_path / "hf", device=torch.device("cpu")).decoder
    pairs = drawn_pairs(VOCABULARY)
    with torch.no_grad():
        check(dict(loglikelihoods(model, pairs, 4, LONGEST)), lambda tokens: theirs(tokens).logits, pairs)


def test_a_folder_opens_on_other_devices_than_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")
    accelerator = Platform(PLATFORMS["cuda"])
    monkeypatch.setattr(load_model, "platform_of", lambda device: accelerator)
    make("llama 1", tmp_path / "hf")
    tiny_tokenizer(tmp_path)[1].rename(tmp_path / "hf" / "tokenizer.json")
    decoder = open_model(tmp_path / "hf", device=torch.device("meta")).decoder
    assert {(one.device.type, one.dtype) for one in decoder.parameters()} == {("meta", torch.bfloat16)}
