"""What the training loop of a library user consists of; `megalaunch` exports it (docs/library.md)."""
