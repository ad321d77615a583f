"""Fused operators: each file holds the plain-torch reference, the Triton kernel and the dispatch."""
