"""Token files in Megatron's `.bin/.idx` format: build, read, merge, verify."""
