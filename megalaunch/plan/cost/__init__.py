"""The time model: `step_time` predicts the seconds of a step by kind, and the throughput and MFU that follow."""

from megalaunch.plan.cost.communication import CommTime
from megalaunch.plan.cost.constants import CONSTANTS, STATEMENTS, Constant, Statement
from megalaunch.plan.cost.step import StepTime, UnknownChipSpeed, step_time

__all__ = [
    "CONSTANTS",
    "STATEMENTS",
    "CommTime",
    "Constant",
    "Statement",
    "StepTime",
    "UnknownChipSpeed",
    "step_time",
]
