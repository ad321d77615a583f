"""Model families: build the decoder of a model section, and map its parameters to Hugging Face tensors."""
