"""What the launcher prints: the display of a run, its summary, its plot and its failure report."""
