"""Saving and loading, under any layout."""
