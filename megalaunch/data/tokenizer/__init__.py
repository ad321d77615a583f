"""Tokenizers of every known kind, loaded and trained."""
