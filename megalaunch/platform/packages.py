"""Check the packages that megalaunch depends on: installed, recent enough, importable.

Versions come from the installed metadata. Imports are tested in subprocesses: a broken package (a wrong build, a
missing library) cannot break this process, and torch is not loaded into it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from megalaunch.installation import install_command
from megalaunch.platform.plugins import PlatformError
from megalaunch.platform.torch_backends import backend_that_may_crash, broken_backend

IMPORT_TIMEOUT = 60.0  # seconds; the first import of torch from a cold disk may take most of it


@dataclass(frozen=True)
class Package:
    """A package by its distribution name.

    Attributes:
        extra: the extra of megalaunch that installs it; None: always installed.
        purpose: the features that need it.
        probe: Python code that fails if the package does not work.
        only_gpu: it has no use on a machine without a GPU.
        install: the arguments of `pip install`; None: the extra, or the name.
    """

    name: str
    extra: str | None
    purpose: str
    probe: str = ""
    only_gpu: bool = False
    install: str | None = None

    @property
    def install_command(self) -> str:
        """The command that installs it."""
        if self.install is not None:
            return f"pip install {self.install}"
        return install_command(f"megalaunch[{self.extra}]" if self.extra else self.name)


PACKAGES = (
    Package("tokenizers", None, "preprocess, train, generate", "import tokenizers"),
    Package("torch", "train", "train, generate", "import torch, torch.distributed; print(torch.cuda.device_count())"),
    Package("safetensors", "train", "checkpoints of train, generate", "import safetensors.torch"),
    Package("matplotlib", "train", "the plots of train, report", "import matplotlib.figure"),
    Package("jinja2", "train", "report", "import jinja2"),
)


DEEP_EP = Package(
    "deep_ep",
    "",
    "parallel.moe_token_dispatcher_type=flex",
    only_gpu=True,
    install="--no-build-isolation git+https://github.com/deepseek-ai/DeepEP",
)

TRANSFORMER_ENGINE = Package(
    "transformer-engine",
    "te",
    "precision.fp8.implementation=transformer_engine, model.attention_backend=te",
    "from megalaunch.engine.precision.transformer_engine import load_transformer_engine as load; load(); "
    "from megalaunch.engine.model.attention.transformer_engine import load_te_attention as load; load()",
    only_gpu=True,
)

NVRX = Package("nvidia-resiliency-ext", "nvrx", "launcher.enable_ft_package")
NVRX_MODULE = "nvidia_resiliency_ext"

FLASH_ATTN = Package(
    "flash-attn",
    "",
    "model.attention_backend=flash_attn",
    "from megalaunch.engine.model.attention.flash_attn import load_flash_attn as load; load()",
    only_gpu=True,
    install="--no-build-isolation 'flash-attn>=2.6'",
)

ATTENTION_PACKAGES: Mapping[str, tuple[Package, tuple[str, ...]]] = MappingProxyType(
    {
        "flash_attn": (FLASH_ATTN, ("flash_attn", "flash_attn_interface")),
        "te": (TRANSFORMER_ENGINE, ("transformer_engine",)),
    }
)
"""The packages of values of model.attention_backend, and their modules, of which one must be there."""


def missing_attention_package(backend: str) -> Package | None:
    """Return the package that this machine lacks for a value of model.attention_backend; None: it lacks none."""
    package, modules = ATTENTION_PACKAGES.get(backend, (None, ()))
    return None if any(importlib.util.find_spec(module) for module in modules) else package


OPTIONAL = (
    Package("gigatoken", "data", "preprocess encodes several times faster"),
    Package("orjson", "data", "preprocess reads jsonl faster"),
    Package("zstandard", "data", "preprocess reads .zst files"),
    Package("pyarrow", "data", "preprocess reads parquet"),
    Package("huggingface_hub", "hub", "models, tokenizers and data of the Hugging Face Hub"),
    Package("nltk", "", "preprocess --split-sentences"),
    Package("transformers", "parity", "convert compares with transformers' own model"),
    Package("starlette", "serve", "serve"),
    Package("uvicorn", "serve", "serve"),
    Package("lm-eval", "lm-eval", "evaluate --task"),
    Package("optuna", "sweep", "sweep --sampler tpe"),
    Package("tensorboard", "trackers", "logging.trackers=[tensorboard]"),
    Package("wandb", "trackers", "logging.trackers=[wandb]"),
    Package("mlflow-skinny", "trackers", "logging.trackers=[mlflow]"),
    Package("opentelemetry-exporter-otlp-proto-http", "trackers", "logging.trackers=[opentelemetry]"),
    Package("triton", "", "fused kernels on NVIDIA GPUs (torch's CUDA build brings it)", only_gpu=True),
    DEEP_EP,
    FLASH_ATTN,
    TRANSFORMER_ENGINE,
    NVRX,
)
"""Packages that only some commands or options need. They are not imported for the check, unless they have a probe."""


@dataclass(frozen=True)
class PackageState:
    """Result of a check.

    Attributes:
        version: None if the package is not installed.
        problem: None if it works.
        output: output of the probe, "" without one.
        cause: what is wrong with another package, which it imports; None: the problem is its own.
    """

    package: Package
    version: str | None
    problem: str | None
    output: str
    cause: PlatformError | None = None


def inspect_packages(packages: Sequence[Package] = PACKAGES) -> list[PackageState]:
    """Check packages and return their states in the given order. The probes run concurrently."""
    versions = {package.name: installed_version(package.name) for package in packages}
    probes = {
        package.name: subprocess.Popen(
            [sys.executable, "-c", package.probe], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for package in packages
        if versions[package.name] is not None
    }
    states = []
    for package in packages:
        version = versions[package.name]
        if version is None:
            states.append(PackageState(package, None, "is not installed", ""))
            continue
        output, problem, cause = _result(probes[package.name])
        minimum = minimum_version(package.name)
        if problem is None and minimum is not None and _numbers(version) < _numbers(minimum):
            problem = f"is older than {minimum}"
        states.append(PackageState(package, version, problem, output, cause))
    return states


EXPERT_MESH_TORCH = "2.12"
"""The first torch whose FSDP2 can shard the experts of a layer over other ranks than its other parameters."""


def lacks_expert_mesh() -> str | None:
    """Return what is missing for experts over tp, ep or etp ranks if the installed torch is too old for them."""
    version = installed_version("torch")
    if version is None or _numbers(version) >= _numbers(EXPERT_MESH_TORCH):
        return None
    return (
        f"experts with tp, ep or etp need torch {EXPERT_MESH_TORCH} or newer, found {version}: "
        "its FSDP2 shards all parameters of a layer over the same ranks"
    )


def torch_build_fix(version: str) -> str:
    """Return what to do about a torch of this version that finds no or too few GPUs of those that the driver has."""
    if version.endswith("+cpu"):
        return "install torch's CUDA build in place of its CPU build"
    return "compare the driver's CUDA version (nvidia-smi) with torch's build"


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def minimum_version(name: str) -> str | None:
    """Return the minimum version in megalaunch's metadata, or None if it gives none."""
    try:
        required = importlib.metadata.requires("megalaunch") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for requirement in required:
        if re.match(rf"{re.escape(name)}\b(?!-)", requirement, re.IGNORECASE):
            minimum = re.search(r">=\s*([\d.]+)", requirement.partition(";")[0])
            return minimum[1] if minimum else None
    return None


def _result(probe: subprocess.Popen[str]) -> tuple[str, str | None, PlatformError | None]:
    """Return a probe's output, the problem (None: it succeeded), and the package that causes it (None: its own)."""
    try:
        output, errors = probe.communicate(timeout=IMPORT_TIMEOUT)
    except subprocess.TimeoutExpired:
        probe.kill()
        probe.communicate()
        return "", f"could not be imported in {IMPORT_TIMEOUT:g} s", None
    if probe.returncode == 0:
        return output.strip(), None, None
    lines = errors.strip().splitlines()
    problem = f"cannot be imported: {lines[-1] if lines else f'exit {probe.returncode}'}"
    return "", problem, backend_that_may_crash() if probe.returncode < 0 else broken_backend(errors)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
