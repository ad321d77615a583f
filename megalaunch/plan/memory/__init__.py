"""The memory model: `predict_memory` returns the bytes by kind of the device that needs most."""

from megalaunch.plan.memory.profiles import CPU_ENGINE, ENGINE, MEGATRON, MemoryProfile, profile_for
from megalaunch.plan.memory.rank import Memory, predict_memory

__all__ = ["CPU_ENGINE", "ENGINE", "MEGATRON", "Memory", "MemoryProfile", "predict_memory", "profile_for"]
