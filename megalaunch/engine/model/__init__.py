"""The decoder, one concept per file. No file here uses a process group."""
