"""Convert between a Hugging Face config.json and the model section."""
