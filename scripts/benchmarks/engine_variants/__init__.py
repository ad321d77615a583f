"""What `scripts/bench engine` compares: our engine, and the same model as others build it."""
