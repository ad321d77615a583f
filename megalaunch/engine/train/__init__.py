"""The training loop: data loading, forward and backward, gradient reduction, checkpoints, logs."""
