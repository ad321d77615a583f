"""Measurements of a training step."""
