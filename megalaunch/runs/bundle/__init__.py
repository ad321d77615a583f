"""The archive of a bug report: what `megalaunch doctor --bundle` collects, with secrets replaced."""
