"""Precision: the dtypes of a training step."""
