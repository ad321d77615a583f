"""Time of a step: `step_time` gives seconds by kind and what follows from them."""

from megalaunch.plan.cost.communication import Exchange
from megalaunch.plan.cost.constants import CONSTANTS, STATEMENTS, Constant, Statement
from megalaunch.plan.cost.step import StepTime, UnknownCost, step_time

__all__ = [
    "CONSTANTS",
    "STATEMENTS",
    "Constant",
    "Exchange",
    "Statement",
    "StepTime",
    "UnknownCost",
    "step_time",
]
