"""What a device is and can do; which implementation of an operator it prefers."""
