"""Operators with several implementations: each file has the plain-torch reference, device forms and the dispatch."""
