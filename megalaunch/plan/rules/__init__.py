"""The rules of a valid run, one file a domain. Importing this package registers all of them."""

from megalaunch.plan.rules import batch, data, launching, model, optimization, parallel, platform, sequence, stages

__all__ = ["batch", "data", "launching", "model", "optimization", "parallel", "platform", "sequence", "stages"]
