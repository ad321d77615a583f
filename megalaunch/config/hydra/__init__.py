"""Hydra and OmegaConf behind four functions: no other package imports them."""
