"""Models, tokenizers and datasets of the Hugging Face Hub by name: `hf://org/name@revision/path`."""
