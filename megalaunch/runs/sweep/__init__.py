"""Validate, plan and run the trials of a sweep."""
