"""Fused operators: each file has the plain-torch reference, the Triton kernel and the dispatch."""
