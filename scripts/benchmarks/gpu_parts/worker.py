"""The process of a part: measures its cases one by one and appends a line of JSON for each, so that none is lost.

Run by gpu.py as `python -m gpu_parts.worker SETTING OUT CASE...`, SETTING in JSON and each CASE as 'kind: case'. It
exits with NEXT_PROCESS where the cases that are left would be disturbed by those before.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_parts.setting import Setting, Unsupported

NEXT_PROCESS = 90
_KEPT_BYTES = 256 << 20  # workspaces of libraries; what is more would count into the peak memory of the next case
_MEMORY_AHEAD = 0.2  # of the card, for a process beside three others and the tests


def _measure(kind: str, case: str, setting: Setting) -> dict[str, Any]:
    """Measure one case; imports only what its kind needs."""
    if kind == "ceilings":
        from gpu_parts.ceilings import ceilings

        return ceilings(setting)[case]()
    if kind == "kernels":
        from gpu_parts.kernels import measure

        return measure(case, setting)
    if kind in ("training", "transformers"):
        from gpu_parts.training import train_steps, train_transformers
        from gpu_parts.workloads import WORKLOADS

        workload = WORKLOADS[case].of_one_layer() if setting.ahead else WORKLOADS[case]
        return (train_steps if kind == "training" else train_transformers)(workload, setting)
    from gpu_parts.checks import CHECKS

    return CHECKS[case](setting)


def _row(kind: str, case: str, setting: Setting) -> dict[str, Any]:
    """Return the row of a case; one that fails says why."""
    started = time.perf_counter()
    try:
        found = _measure(kind, case, setting)
    except Unsupported as lack:
        found = {"unsupported": str(lack)}
    except Exception as problem:
        traceback.print_exc()
        found = {"failed": f"{type(problem).__name__}: {problem}"[:1500]}
    return {"kind": kind, "case": case, "wall": time.perf_counter() - started, **found}


def main(setting: Setting, out: Path, names: Sequence[str]) -> int:
    """Measure the cases in order, but checks all at once; return the exit code."""
    cases = [(kind, case) for kind, _, case in (name.partition(": ") for name in names)]
    with ThreadPoolExecutor(max_workers=len(cases)) as pool:
        checks = {one: pool.submit(_row, *one, setting) for one in cases if one[0] == "checks"}
        for one in cases:
            row = checks[one].result() if one in checks else _row(*one, setting)
            with open(out, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            if one not in checks and not _is_as_new(setting) and not setting.ahead:
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


def _leave_memory_to_others() -> None:
    """Take at most a part of the card's memory: what then fails is compiled in its run."""
    import torch

    torch.cuda.set_per_process_memory_fraction(_MEMORY_AHEAD)


if __name__ == "__main__":
    chosen = Setting(**json.loads(sys.argv[1]))
    if chosen.ahead and chosen.device == "cuda":
        _leave_memory_to_others()
    sys.exit(main(chosen, Path(sys.argv[2]), sys.argv[3:]))
