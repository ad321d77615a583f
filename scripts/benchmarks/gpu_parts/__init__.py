"""The parts of `scripts/bench gpu`: ceilings of the card, kernels, training steps, checks."""
