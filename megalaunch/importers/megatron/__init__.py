"""Megatron-LM launch scripts read as data, and turned into recipes."""
