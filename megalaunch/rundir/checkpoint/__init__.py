"""What a checkpoint is on disk, for both wings: its files, their hashes, which tensors they hold. Reads only."""
