"""Adapter for EleutherAI's lm-evaluation-harness: importing this module registers the model type `megalaunch`.

`python -m megalaunch.engine.lm_eval_adapter` is lm-eval's own command line with that model type registered.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from megalaunch.engine.inference.chat_template import named_token
from megalaunch.engine.inference.generate import TextModel
from megalaunch.engine.inference.load_model import LanguageModel, ModelSource, open_model
from megalaunch.engine.inference.loglikelihood import loglikelihoods
from megalaunch.engine.inference.request import GenerationRequest, generate_with
from megalaunch.engine.inference.sampling import Sampling
from megalaunch.engine.inference.sequence_text import Completion
from megalaunch.engine.platform.registry import platform_of

_log = logging.getLogger(__name__)
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@register_model("megalaunch")
class LMEvalModel(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """lm-eval model over a megalaunch model: log-likelihoods and generated texts, as lm-eval's `hf` computes them.

    Args:
        pretrained: A run, checkpoint or Hugging Face directory, or a loaded model.
        batch_size: Rows of a forward pass.
        max_length: Maximum context in tokens; None: the model's maximum. Longer inputs are truncated from the left.
        max_gen_toks: Maximum number of generated tokens, for tasks that do not set it.
        device: torch device name; None, or CUDA where there is none: the best device of this machine.
        computing: Computes the logits in place of a loaded model's decoder; `pretrained` may lack weights then.

    Raises:
        ValueError: `batch_size` or `max_length` is invalid; other errors as `open_model`.
    """

    def __init__(
        self,
        pretrained: str | Path | ModelSource,
        batch_size: int | str = 1,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        device: str | None = None,
        computing: TextModel | None = None,
    ) -> None:
        super().__init__()
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ValueError(f"batch_size must be a number of rows, 1 or more, not {batch_size!r}")
        if not isinstance(pretrained, ModelSource):
            pretrained = open_model(Path(pretrained).expanduser(), device=_device(device))
        self._model: ModelSource = pretrained
        if computing is None:
            assert isinstance(pretrained, LanguageModel), "a source without weights comes with what computes"
            computing = pretrained.decoder
        self._computing: TextModel = computing
        self._device, self.batch_size, self.max_gen_toks = computing.device, int(batch_size), max_gen_toks
        made_for = self._model.spec.model.max_position_embeddings
        self.max_length = made_for if max_length is None else max_length
        if not 1 <= self.max_length <= made_for:
            raise ValueError(
                f"max_length must be from 1 to the {made_for} that the model is made for, not {max_length}"
            )

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token id; raises ValueError if the tokenizer defines none."""
        found = self._task_name("eos_token")
        found = self._model.tokenizer.eod_id if found is None else found
        if found is None:
            raise ValueError("the tokenizer of this model names no token that begins or ends a text")
        return found

    @property
    def prefix_token_id(self) -> int:
        """The token id that precedes a text without context: BOS, else end of text."""
        found = self._task_name("bos_token")
        return self.eot_token_id if found is None else found

    def _task_name(self, role: str) -> int | None:
        token = named_token(self._model.files, role)
        return None if token is None else self._model.tokenizer.token_id(token)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Tokenize, with the tokenizer's special tokens unless the text already starts with BOS."""
        begin = named_token(self._model.files, "bos_token")
        around = not (begin and string.startswith(begin)) if add_special_tokens is None else add_special_tokens
        return self._model.tokenizer.encode(string, around)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: object
    ) -> list[tuple[float, bool]]:
        pairs = [(before, after) for _, before, after in requests]
        self._warn_truncated(
            sum(len(before) + len(after) > self.max_length + 1 for before, after in pairs), self.max_length
        )
        found: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        every = self.score_pairs(pairs)
        for number, likelihood in tqdm(every, "log-likelihoods", len(pairs), disable=disable_tqdm):
            found[number] = (likelihood[0], likelihood[1])
            if requests[number][0] is not None:  # windows of a longer text have no request of their own to cache
                self.cache_hook.add_partial("loglikelihood", requests[number][0], found[number])
        return found

    def score_pairs(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Yield the number of each pair (context, continuation), its log-likelihood, and whether it is greedy."""
        assert isinstance(self._model, LanguageModel), "a source without weights overrides this"
        yield from loglikelihoods(self._model.decoder, pairs, self.batch_size, self.max_length)

    def _warn_truncated(self, count: int, room: int) -> None:
        if count:
            _log.warning(
                "%d texts are longer than the %d tokens that there is room for: cut from the left", count, room
            )

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of full texts: rolling windows of `max_length` tokens score each token once."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[number] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate after each text, up to one of its stop strings. Requests with equal settings share a batch."""
        alike: dict[str, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            alike[repr(sorted(request.args[1].items()))].append(number)
        found = [""] * len(requests)
        with tqdm(total=len(requests), desc="texts", disable=disable_tqdm) as progress:
            for numbers in alike.values():
                for number, text in self._generate_group(requests, numbers):
                    found[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
                    progress.update()
        return found

    def _generate_group(self, requests: Sequence[Any], numbers: Sequence[int]) -> Iterator[tuple[int, str]]:
        """Yield (request number, text) of requests with equal generation settings."""
        request = _generation_request(requests[numbers[0]].args[1], self.max_gen_toks, self.batch_size)
        room = self.max_length - request.max_new_tokens
        if room < 1:
            raise ValueError(
                f"max_gen_toks={request.max_new_tokens} leaves no room for a prompt in the {self.max_length} tokens "
                "that are read at once; ask for shorter texts (max_gen_toks)"
            )
        prompts = {number: self.tok_encode(requests[number].args[0]) or [self.prefix_token_id] for number in numbers}
        self._warn_truncated(sum(len(tokens) > room for tokens in prompts.values()), room)
        ordered = sorted(numbers, key=lambda number: len(prompts[number]), reverse=True)
        for answer in generate_with(self._computing, self._model, [prompts[n][-room:] for n in ordered], request):
            if isinstance(answer, Completion):
                # decode without the prompt, as `hf` does: some tokenizers then omit a leading space
                text = self._model.tokenizer.decode(answer.tokens)
                yield ordered[answer.row], postprocess_generated_text(text, list(request.stop), None)


def _device(name: str | None) -> torch.device | None:
    """Return the device; None (the best one) if it cannot be used: lm-eval's default is a GPU, also without one."""
    if name is None:
        return None
    device = torch.device(name)
    return device if platform_of(device).unusable() is None else None


def _generation_request(wishes: Mapping[str, Any], max_gen_toks: int, batch_size: int) -> GenerationRequest:
    """Convert a task's `generation_kwargs` to a generation request; raises ValueError for unknown ones."""
    wanted = dict(normalize_gen_kwargs(dict(wishes), max_gen_toks))
    most, stop, draw = wanted.pop("max_gen_toks"), wanted.pop("until"), wanted.pop("do_sample")
    unknown = sorted(wanted.keys() - {*_SAMPLING})
    if unknown:
        raise ValueError(f"generation_kwargs: {', '.join(unknown)} is unknown; known are {', '.join(_SAMPLING)}")
    chosen = {name: value for name, value in wanted.items() if value is not None}
    chosen["temperature"] = float(chosen.get("temperature", 1.0)) if draw else 0.0
    return GenerationRequest(most, Sampling(**chosen), tuple(one for one in stop if one), batch_size=batch_size)


@dataclass(frozen=True)
class TaskScore:
    """One score of a task: `metric` after `filter` (lm-eval's names), over `samples` samples."""

    task: str
    metric: str
    filter: str
    value: float
    stderr: float | None
    samples: int


def task_scores(
    model: LanguageModel,
    tasks: Sequence[str],
    include_path: Path | None,
    num_fewshot: int | None,
    limit: int | None,
    batch_size: int,
    max_length: int | None,
) -> list[TaskScore]:
    """Run tasks of lm-eval and return all their scores.

    Args:
        model: The model.
        tasks: Task names.
        include_path: Folder with further task definitions.
        num_fewshot: Number of few-shot examples; None: as the task defines.
        limit: Number of samples of each task, the first ones; None: all.
        batch_size: Rows of a forward pass.
        max_length: Maximum context in tokens; None: the model's maximum.

    Raises:
        ValueError: A task is unknown, or requires an unsupported generation setting.
        OSError: The data of a task is missing.
    """
    manager = index_tasks(tasks, include_path)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise ValueError(
            f"lm-eval has no task {', '.join(unknown)}; `lm-eval ls tasks` shows its own, and --include-path names a "
            "folder with others"
        )
    found = simple_evaluate(
        model=LMEvalModel(model, batch_size, max_length),
        tasks=list(tasks),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        log_samples=False,
    )
    return read_scores(found)


def index_tasks(tasks: Sequence[str], include_path: Path | None) -> TaskManager:
    """Return an index that holds the tasks, if they exist.

    lm-eval's own tasks are thousands of files, which take seconds to read: they are left out if `include_path` has all
    the tasks. A group or tag may name tasks of lm-eval, so that it needs them.
    """
    if include_path is not None:
        included = TaskManager(include_path=str(include_path), include_defaults=False)
        if set(tasks) <= set(included.all_subtasks):
            return included
    return TaskManager(include_path=None if include_path is None else str(include_path))


def read_scores(found: Mapping[str, Any]) -> list[TaskScore]:
    """Return all scores in the results of lm-eval's `simple_evaluate`."""
    return [
        score for task, figures in found["results"].items() for score in _figures(task, figures, found["n-samples"])
    ]


def _figures(task: str, figures: Mapping[str, Any], samples: Mapping[str, Any]) -> Iterator[TaskScore]:
    for key, value in figures.items():
        metric, comma, filter_name = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            stderr = figures.get(f"{metric}_stderr,{filter_name}")
            count = samples.get(task, {}).get("effective", 0)
            yield TaskScore(task, metric, filter_name, value, stderr if isinstance(stderr, float) else None, count)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
