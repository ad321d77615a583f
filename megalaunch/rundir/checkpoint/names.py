"""Names of the parts of a run's checkpoint, for all readers and writers."""

from __future__ import annotations

SPEC_FILE = "spec.yaml"
TOKENIZER_FILE = "tokenizer.json"
POSITION = "position"  # the document with the progress of the run: step, tokens
WEIGHTS = "model."  # prefix of the name of each parameter of the decoder
ORIGIN = "origin"  # the document about the source of the weights: true vocabulary size, config.json
ORIGIN_FILE = "huggingface."  # prefix of the name of each file that came with the source's weights
