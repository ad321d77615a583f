"""From YAML groups and command-line words to one typed run spec."""
