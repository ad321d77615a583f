"""The time model: `step_time` predicts the seconds of a step by kind, and the throughput and MFU that follow."""

from megalaunch.plan.cost.communication import CommTime
from megalaunch.plan.cost.constants import CONSTANTS, STATEMENTS, Constant, Statement
from megalaunch.plan.cost.stacks import (
    LLMQ,
    MEGATRON,
    PYTORCH_COMPILED,
    PYTORCH_EAGER,
    Stack,
    describe_kernels,
    engine_stack,
)
from megalaunch.plan.cost.step import StepTime, UnknownChipSpeed, known_peak, step_time

__all__ = [
    "CONSTANTS",
    "LLMQ",
    "MEGATRON",
    "PYTORCH_COMPILED",
    "PYTORCH_EAGER",
    "STATEMENTS",
    "CommTime",
    "Constant",
    "Stack",
    "Statement",
    "StepTime",
    "UnknownChipSpeed",
    "describe_kernels",
    "engine_stack",
    "known_peak",
    "step_time",
]
