"""Mixture of experts: the router, the experts, and the layer that connects them through a token dispatcher."""
