"""Bytes that an update of the optimizer moves in the memory of a device."""

from __future__ import annotations

from megalaunch.plan.memory.dtypes_and_groups import dtype_bytes
from megalaunch.plan.memory.model_states import states_per_parameter
from megalaunch.plan.memory.param_bytes import main_param_bytes, moment_bytes
from megalaunch.schema import RunSpec


def update_traffic(spec: RunSpec) -> int:
    """Return the bytes per parameter: 38 of AdamW in fp32 with bf16 compute.

    The gradient, in the dtype of main parameters, is read for its norm and for the update. Main parameters and states
    are read and written. A main parameter that is wider than the compute dtype is read, and its copy written.
    """
    main, compute = main_param_bytes(spec), dtype_bytes(spec.precision.compute_dtype)
    copy = main + compute if compute < main else 0
    return 4 * main + 2 * states_per_parameter(spec.optimizer) * moment_bytes(spec) + copy
