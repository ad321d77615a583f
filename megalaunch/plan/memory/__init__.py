"""Memory of a rank: `memory_of` gives the bytes of the worst stage's device by kind."""

from megalaunch.plan.memory.profiles import CPU_ENGINE, ENGINE, MEGATRON, MemoryProfile, profile_for
from megalaunch.plan.memory.rank import Memory, predict_memory

__all__ = ["ENGINE", "MEGATRON", "CPU_ENGINE", "MemoryProfile", "Memory", "profile_for", "predict_memory"]
