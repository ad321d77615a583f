"""Memory of a rank: `predict_memory` gives the bytes of the worst stage's device by kind."""

from megalaunch.plan.memory.profiles import CPU_ENGINE, ENGINE, MEGATRON, MemoryProfile, profile_for
from megalaunch.plan.memory.rank import Memory, predict_memory

__all__ = ["CPU_ENGINE", "ENGINE", "MEGATRON", "Memory", "MemoryProfile", "predict_memory", "profile_for"]
