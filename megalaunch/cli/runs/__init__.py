"""`megalaunch runs`: list, compare and clean the runs of a folder."""
