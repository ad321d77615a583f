"""Attention: the module, its masks, score modification and implementations."""
