"""The command line: one folder a command family; parse, call, render."""
