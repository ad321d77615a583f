"""End a command early on a machine that lacks the packages of training."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from megalaunch.installation import install_command
from megalaunch.runs.errors import fail

if TYPE_CHECKING:
    from megalaunch.schema import RunSpec

_TRAINING_PACKAGES = ("torch", "safetensors")
_TRACKER_MODULES = {"opentelemetry": "opentelemetry.exporter.otlp.proto.http"}  # where its name is not the module's


def require_training_packages() -> None:
    """End the command if torch or safetensors is not installed: the launcher alone installs without them."""
    missing = [name for name in _TRAINING_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        fail(
            f"training needs {' and '.join(missing)}, which this installation of megalaunch lacks.\n"
            f"fix:  {install_command('megalaunch[train]')}"
        )


def require_optional_packages(spec: RunSpec) -> None:
    """End the command if this machine lacks a package, or a version of torch, that the resolved spec asks for."""
    from megalaunch.plan.topology import Topology
    from megalaunch.platform.packages import (
        DEEP_EP,
        EXPERT_MESH_TORCH,
        NVRX,
        NVRX_MODULE,
        TRANSFORMER_ENGINE,
        lacks_expert_mesh,
        missing_attention_package,
    )

    missing = [name for name in spec.logging.trackers if not _is_installed(_TRACKER_MODULES.get(name, name))]
    if missing:
        others = [name for name in spec.logging.trackers if name not in missing]
        fail(
            f"logging.trackers needs {' and '.join(missing)}, not installed here.\n"
            f"fix:  {install_command('megalaunch[trackers]')}\n      or logging.trackers=[{','.join(others)}]"
        )

    if spec.train.eval_tasks.names and importlib.util.find_spec("lm_eval") is None:
        fail(f"train.eval_tasks needs lm-eval, which is not installed.\nfix:  {install_command('megalaunch[lm-eval]')}")
    if (reason := lacks_expert_mesh()) is not None and Topology.from_spec(spec).has_expert_mesh:
        fail(f"{reason}.\nfix:  {install_command(f'torch>={EXPERT_MESH_TORCH}')}")
    flex = spec.parallel.moe_token_dispatcher_type == "flex"
    if flex and importlib.util.find_spec(DEEP_EP.name) is None:
        fail(
            f"parallel.moe_token_dispatcher_type=flex needs DeepEP ({DEEP_EP.name}), which is not installed.\n"
            f"fix:  {DEEP_EP.install_command}\n"
            "      or parallel.moe_token_dispatcher_type=alltoall"
        )
    if spec.precision.uses_transformer_engine and importlib.util.find_spec("transformer_engine") is None:
        fail(
            "precision.fp8.implementation=transformer_engine needs Transformer Engine "
            f"({TRANSFORMER_ENGINE.name}), which is not installed.\n"
            f"fix:  {TRANSFORMER_ENGINE.install_command}\n"
            "      or precision.fp8.implementation=native"
        )
    if spec.launcher.enable_ft_package and importlib.util.find_spec(NVRX_MODULE) is None:
        fail(
            f"launcher.enable_ft_package needs NVRx ({NVRX.name}), which is not installed.\n"
            f"fix:  {NVRX.install_command}\n"
            "      or launcher.enable_ft_package=false"
        )
    backend = spec.model.attention_backend
    if (package := missing_attention_package(backend)) is not None:
        fail(
            f"model.attention_backend={backend} needs the package {package.name}, which is not installed.\n"
            f"fix:  {package.install_command}\n"
            "      or model.attention_backend=auto"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False
