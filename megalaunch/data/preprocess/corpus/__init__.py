"""The documents of `data.corpus` to token files."""
