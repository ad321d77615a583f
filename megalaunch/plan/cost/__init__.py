"""Time of a step: `step_time` gives seconds by kind and what follows from them."""

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
