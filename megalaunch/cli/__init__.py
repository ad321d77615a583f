"""The command line: one small file a command; parses, calls, renders."""
