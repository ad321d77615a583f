"""`megalaunch data`, `preprocess` and `tokenizer`."""
