"""Datasets of training and validation samples drawn from token files, in Megatron's order."""
