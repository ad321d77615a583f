"""config.json of published models, from the table beside the tests of families."""

from __future__ import annotations

from typing import Any

import yaml
from paths import TESTS

TABLE = TESTS / "parity" / "families" / "published_configs.yaml"
# Keys that shape no logit.
NO_SHAPE = {
    *("architectures", "model_type", "transformers_version", "dtype", "id2label", "label2id", "_name_or_path"),
    *("problem_type", "is_encoder_decoder", "output_hidden_states", "return_dict", "chunk_size_feed_forward"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range", "output_attentions"),
}


def published_configs() -> dict[str, dict[str, Any]]:
    """By name, lists of factors written out."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return {name: _written_out(config) for name, config in yaml.load(TABLE.read_text(), Loader=loader).items()}


def _written_out(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"from", "to", "count"}:
        step = (value["to"] - value["from"]) / (value["count"] - 1)
        return [value["from"] + step * index for index in range(value["count"])]
    return {key: _written_out(inner) for key, inner in value.items()} if isinstance(value, dict) else value
