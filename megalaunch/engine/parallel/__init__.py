"""How a model is laid out over a mesh, one axis a file."""
