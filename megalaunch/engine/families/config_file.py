"""Reading a Hugging Face config.json: every key that changes the function is read, or the file is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keys that name, initialise, train, serve or store a model: its logits do not depend on them.
HARMLESS = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_internal",
        "_name_or_path",
        "add_cross_attention",
        "architectures",
        "auto_map",
        "bos_token_id",
        "cache_implementation",
        "classifier_dropout",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "is_decoder",
        "is_encoder_decoder",
        "keys_to_ignore_at_inference",
        "label2id",
        "max_length",
        "model_type",
        "n_ctx",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "sep_token_id",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "use_cache",
        "reorder_and_upcast_attn",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "gradient_checkpointing",
    }
)
_MISSING = object()


class ConfigFile:
    """The keys of one file, and everything that keeps it from being carried over exactly."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data
        self._taken: set[str] = set()
        self.problems: list[str] = []

    def take(self, key: str, default: Any = _MISSING) -> Any:
        """The value of a key, null where it is; `default` where there is none, or a problem without a default."""
        self._taken.add(key)
        if key in self._data:
            return self._data[key]
        if default is _MISSING:
            self.problems.append(f"config.json has no {key}")
            return None
        return default

    def number(self, key: str, default: Any = _MISSING) -> Any:
        """A number above 0; null and a missing key give the default."""
        value = self.take(key, default)
        value = default if value is None and default is not _MISSING else value
        wrong = value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0)
        if wrong:
            self.problems.append(f"config.json: {key} is {value!r}, and has to be a number above 0")
        return None if wrong else value

    def integer(self, key: str, default: Any = _MISSING) -> Any:
        """A whole number above 0; null and a missing key give the default."""
        value = self.number(key, default)
        if isinstance(value, float):
            self.problems.append(f"config.json: {key} is {value!r}, and has to be a whole number")
            return None
        return value

    def choose(self, key: str, choices: Mapping[str, Any], default: str) -> Any:
        """What a word means; a problem when it is none of the choices."""
        word = self.take(key, default)
        if not isinstance(word, str) or word not in choices:
            self.problems.append(f"config.json: {key} is {word!r}; this family's are {', '.join(choices)}")
            return None
        return choices[word]

    def expect(self, key: str, value: Any) -> None:
        """A key that may only have one value: the others have no counterpart here."""
        found = self.take(key, value)
        if found != value:
            self.problems.append(f"config.json: {key} is {found!r}; only {value!r} has a counterpart here")

    def refuse_the_rest(self) -> None:
        """Every key that was not read and is not known to be harmless becomes a problem."""
        for key, value in self._data.items():
            if key not in self._taken | HARMLESS and value is not None:
                self.problems.append(f"config.json: {key} ({value!r:.80}) is unknown to this family")


def every_nth(marks: list[bool], what: str, problems: list[str]) -> int | None:
    """n where exactly the items n - 1, 2 n - 1, ... are marked, None where none is."""
    if not any(marks):
        return None
    every = marks.index(True) + 1
    if marks != [(index + 1) % every == 0 for index in range(len(marks))]:
        problems.append(
            f"config.json: {what} of the layers are no every n-th: {''.join('x' if m else '.' for m in marks)}"
        )
    return every
