"""The deep plan: one real step as any rank of any world, on tensors without memory, with every byte accounted."""
