"""The HTML report: one self-contained page about a run, or about several side by side."""
