"""Which decoder a model spec means, and what its tensors are called elsewhere."""
