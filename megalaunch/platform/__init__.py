"""Platforms: device capabilities, and the preferred implementation of each operator."""
