"""Memory of a rank: `memory_of` gives the bytes of the worst stage's device by kind."""

from megalaunch.plan.memory.accounting import ENGINE, MEGATRON, PROCESSOR, Accounting, accounting_of
from megalaunch.plan.memory.rank import Memory, memory_of

__all__ = ["ENGINE", "MEGATRON", "PROCESSOR", "Accounting", "Memory", "accounting_of", "memory_of"]
