"""Distributed checkpoints: save under one parallel layout, load under any other."""
