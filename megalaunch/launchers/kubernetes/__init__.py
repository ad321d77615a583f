"""Kubernetes: a manifest with one agent in each pod, and the calls of kubectl that create, show and stop it."""
