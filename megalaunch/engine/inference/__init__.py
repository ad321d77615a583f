"""Inference: text generation with a KV cache, log-likelihoods, and the jobs that workers run."""
