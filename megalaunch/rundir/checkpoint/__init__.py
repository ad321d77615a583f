"""The checkpoint format on disk, for launcher and engine: files, hashes and tensor index. Read-only."""
