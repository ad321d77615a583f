"""The decoder, one concept a file; no process group appears here."""
