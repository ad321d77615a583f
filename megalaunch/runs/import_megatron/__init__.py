"""Import a Megatron-LM launch script as a recipe."""
