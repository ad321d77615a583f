"""The process of a part: measures its cases one by one and appends a line of JSON for each, so that none is lost.

Run by gpu.py as `python -m gpu_parts.worker KIND SETTING OUT CASE...`, SETTING in JSON. It exits with NEXT_PROCESS
where the cases that are left would be disturbed by those before.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu_parts.setting import Setting

NEXT_PROCESS = 90
_KEPT_BYTES = 256 << 20  # workspaces of libraries; what is more would count into the peak memory of the next case


def _measures(kind: str, setting: Setting) -> Callable[[str], dict[str, Any]]:
    """Return what measures one case of a part; imports only what this kind needs."""
    if kind == "ceilings":
        from gpu_parts.ceilings import ceilings

        return lambda case: ceilings(setting)[case]()
    if kind == "kernels":
        from gpu_parts.kernels import measure

        return lambda case: measure(case, setting)
    if kind in ("training", "transformers"):
        from gpu_parts.training import train_steps, train_transformers
        from gpu_parts.workloads import WORKLOADS

        train = train_steps if kind == "training" else train_transformers
        return lambda case: train(WORKLOADS[case], setting)
    from gpu_parts.checks import CHECKS

    return lambda case: CHECKS[case](setting)


def main(kind: str, setting: Setting, out: Path, cases: Sequence[str]) -> int:
    """Measure the cases in order; return the exit code."""
    measured = _measures(kind, setting)
    for case in cases:
        started = time.perf_counter()
        try:
            found = measured(case)
        except Exception as problem:
            traceback.print_exc()
            found = {"failed": f"{type(problem).__name__}: {problem}"[:1500]}
        with open(out, "a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "case": case, "wall": time.perf_counter() - started, **found}) + "\n")
        if kind != "checks" and not _is_as_new(setting):
            return NEXT_PROCESS
    return 0


def _is_as_new(setting: Setting) -> bool:
    """Forget compiled functions, which torch limits in number, and free memory; return whether this succeeded."""
    import torch

    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if setting.device != "cuda":
        return True
    try:
        torch.cuda.synchronize()  # raises for ever after an illegal access
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() < _KEPT_BYTES


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Setting(**json.loads(sys.argv[2])), Path(sys.argv[3]), sys.argv[4:]))
