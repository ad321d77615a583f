"""Sweeps: many runs that differ in a few words, the impossible ones left out, the others ranked."""
