"""Text to tokens to samples, without torch."""
