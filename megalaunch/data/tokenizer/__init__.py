"""Tokenizers of all supported file types: loading and training."""
