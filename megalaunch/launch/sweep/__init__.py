"""Sweeps: runs that differ in a few overrides; invalid points are skipped, the others are ranked."""
