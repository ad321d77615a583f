"""`megalaunch recipes` and `import-megatron`."""
