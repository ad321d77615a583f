"""Load what other packages bring for a device type, as a worker does, and print what is wrong with it.

    python -m megalaunch.engine.platform.load_plugins TYPE

A process of its own for `megalaunch doctor`: vendors' packages import torch, and a broken one may end the process.
"""

from __future__ import annotations

import json
import sys

from megalaunch.engine.platform.registry import get_platform
from megalaunch.kernels.overridable import load_overrides
from megalaunch.platform.plugins import PlatformError


def main(device_type: str) -> None:
    """Print one line of JSON: null, or cause and fix of the first problem."""
    problem = None
    try:
        get_platform(device_type).unusable()  # imports its package; a missing device is no fault of it
        load_overrides(device_type)
    except PlatformError as error:
        problem = {"problem": error.cause, "fix": error.fix}
    print(json.dumps(problem))


if __name__ == "__main__":
    main(sys.argv[1])
