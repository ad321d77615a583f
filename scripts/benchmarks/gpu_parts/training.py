"""Training steps of the engine, as a worker runs them, and of transformers on the same model and tokens."""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_parts.setting import Setting
from gpu_parts.workloads import Workload
from megalaunch.engine.measure.step_profiler import StepProfiler
from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.parallel.parallelize import build_sharded_model
from megalaunch.engine.parallel.step_observer import NO_OBSERVER
from megalaunch.engine.platform.registry import get_platform
from megalaunch.engine.precision.backend_flags import set_backend_flags
from megalaunch.engine.process_group import destroy_process_group, init_process_group
from megalaunch.engine.simulate.step import make_observed_step
from megalaunch.engine.train.dataloader import MicroBatch, StepBatch
from megalaunch.importers.huggingface.registry import to_hf_config, with_family
from megalaunch.plan.cost import step_time
from megalaunch.plan.cost.step import UnknownChipSpeed
from megalaunch.plan.flops import step_flops
from megalaunch.plan.memory import predict_memory
from megalaunch.plan.topology import Topology
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec, with_values

_WARM, _TIMED = 1, 3  # the first step compiles and allocates; the median drops another that differs
_WARM_GRAPHS = 4  # layers are captured in their third pass and some later ones


def train_steps(workload: Workload, setting: Setting) -> dict[str, Any]:
    """Time the engine's steps; peak memory and time stand beside what the planner predicts."""
    spec = workload.spec(setting)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ[name] = value
    os.environ["MASTER_PORT"] = str(_free_port())
    device, problem = init_process_group(spec)
    if problem is not None:
        raise RuntimeError(problem.reason)
    try:
        set_backend_flags(spec, device)
        mesh = make_mesh(Topology.from_spec(spec), device, 0)
        model = build_sharded_model(spec, mesh)
        optimizer = Optimizer(model, spec.optimizer, spec.precision)
        step = make_observed_step(spec, mesh, model, optimizer, NO_OBSERVER)
        batch = _batch(spec, device)
        numbers = iter(range(1, 1000))
        found = _time(lambda: step.run(next(numbers), replace(batch)).loss, spec, device)
        if setting.profile:
            found["profile"] = _profile(lambda: step.run(next(numbers), replace(batch)).loss, spec, device)
    finally:
        destroy_process_group()
    return found | _predictions(spec, found)


def train_transformers(workload: Workload, setting: Setting) -> dict[str, Any]:
    """Time the same steps in transformers: fp32 weights, autocast to bf16, SDPA, torch.compile, fused AdamW.

    The microbatch is one sample, as its loss holds all logits. Each layer is compiled, as the engine does, and the
    loss: a graph of the whole model would take a minute to compile.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_layers import GradientCheckpointingLayer

    spec = workload.spec(setting)
    device = torch.device(setting.device)
    config = to_hf_config(with_family(spec.model))
    config = AutoConfig.for_model(**config, use_cache=False)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    model.train()
    if setting.compile:
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.compile()
        model.loss_function = torch.compile(model.loss_function)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    samples = [sample for one in _batch(spec, device).microbatches for sample in one.tokens.split(1)]

    def one_step() -> float:
        total = torch.zeros((), device=device)
        for tokens in samples:
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss / len(samples)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    return _time(one_step, spec, device)


def _batch(spec: RunSpec, device: torch.device) -> StepBatch:
    """Random tokens, the same for every implementation."""
    samples, length = spec.batch.micro_batch_size or 1, spec.batch.sequence_length
    count = spec.batch.global_batch_size // samples
    rows = np.random.default_rng(0).integers(0, spec.model.vocab_size or 0, (count, samples, length + 1))
    pairs = [torch.from_numpy(row).to(device) for row in rows]
    microbatches = tuple(MicroBatch(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in pairs)
    indices = tuple(range(n * samples, (n + 1) * samples) for n in range(count))
    return StepBatch(indices, microbatches, count * samples * length)


def _time(one_step: Callable[[], float], spec: RunSpec, device: torch.device) -> dict[str, Any]:
    """Warm up, then take the median of steps, each of which ends with its loss on the host."""
    platform = get_platform(device.type)
    started = time.perf_counter()
    losses = [one_step() for _ in range(_WARM_GRAPHS if spec.train.cuda_graphs else _WARM)]
    warm = time.perf_counter() - started
    seconds = []
    for _ in range(_TIMED):
        started = time.perf_counter()
        losses.append(one_step())
        platform.synchronize(device)
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds)
    tokens = spec.batch.global_batch_size * spec.batch.sequence_length
    return {
        "tokens_per_second": tokens / median,
        "step_seconds": median,
        "all_seconds": seconds,
        "warm_up_seconds": warm,
        "tflops": step_flops(spec) / median / 1e12,
        "peak_gb": platform.max_memory_allocated(device) / 1e9,
        "losses": [losses[0], losses[-1]],
    }


def _predictions(spec: RunSpec, found: dict[str, Any]) -> dict[str, Any]:
    predicted: dict[str, Any] = {"planned_gb": predict_memory(spec).total / 1e9}
    try:
        time_of_step = step_time(spec)
    except UnknownChipSpeed:
        return predicted
    return predicted | {
        "planned_seconds": time_of_step.total,
        "mfu_causal": step_flops(spec) / found["step_seconds"] / time_of_step.peak,
    }


def _profile(one_step: Callable[[], float], spec: RunSpec, device: torch.device) -> str:
    """Return the summary of one more step under the profiler."""
    with tempfile.TemporaryDirectory() as folder:
        profiled = with_values(spec, {"logging.profile": "steps:1-1"})
        profiler = StepProfiler(profiled.logging, RunDirectory(Path(folder)), 0, device)
        with profiler.record(1):
            one_step()
        summary = profiler.write_after(1, 1)
        return "" if summary is None else summary.read_text()


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
