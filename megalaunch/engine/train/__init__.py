"""The training loop: data loading, forward and backward, gradient reduction, optimizer step, checkpoints, logs."""
