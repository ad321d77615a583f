"""Compose YAML config groups, recipes and command-line overrides to one typed run spec."""
