"""Attention: the module, attention masks, score modification and implementations of core attention."""
