"""megalaunch: train large language models with Megatron-style parallelism from declarative recipes."""

__version__ = "0.1.0"
