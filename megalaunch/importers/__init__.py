"""Import runs and models of other programs as sections of a run spec, without torch."""
