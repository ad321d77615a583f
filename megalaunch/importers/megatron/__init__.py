"""Convert Megatron-LM launch scripts to recipes. A script is parsed, never run."""
