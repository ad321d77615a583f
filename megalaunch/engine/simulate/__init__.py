"""The deep plan: run one real step as any rank of any world, on fake tensors, and account for every byte."""
