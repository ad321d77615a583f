"""Weight maps: the tensor names and transforms of each family's Hugging Face folder, one family a file."""
