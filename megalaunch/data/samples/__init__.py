"""Samples drawn from token files, in Megatron's order."""
