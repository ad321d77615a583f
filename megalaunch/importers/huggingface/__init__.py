"""A Hugging Face config.json <-> the model section."""
