"""What the parts of a run's checkpoint are called; whoever writes or reads one imports the names from here."""

from __future__ import annotations

SPEC_FILE = "spec.yaml"
TOKENIZER_FILE = "tokenizer.json"
POSITION = "position"  # the document that says how far the run was: step, tokens
WEIGHTS = "model."  # before the name of each of the decoder's parameters
ORIGIN = "origin"  # a document: true vocabulary and config.json of the folder that the weights came from
ORIGIN_FILE = "huggingface."  # before the name of each file that travelled with them
