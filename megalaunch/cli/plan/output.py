"""Output of `megalaunch plan`: findings, then the prediction as tables or as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from megalaunch.format.table import table_lines

if TYPE_CHECKING:
    from megalaunch.plan.check import HasOrigin
    from megalaunch.plan.cost import StepTime
    from megalaunch.plan.findings import Finding
    from megalaunch.plan.prediction import ExpertWork, Groups, Prediction
    from megalaunch.plan.resolve import Resolution
    from megalaunch.schema import RunSpec

_GB = 1e9
_PLANNED = {"model", "parallel", "precision", "recompute", "platform", "cluster", "batch"}  # sections of the spec
_MACHINE = "platform.this_machine"  # the rule about a platform that is asked for and cannot be used here
_COMPUTE = {
    "matmul": "matmuls",
    "attention": "attention",
    "memory": "memory-bound kernels",
    "head": "head and loss",
    "recompute": "recomputation",
    "launch_overhead": "launch overhead, overlap slowdown",
}
_COMMUNICATION = {
    "tp": "tp all-gather, reduce-scatter",
    "cp": "cp keys and values",
    "ep": "ep all-to-all",
    "pp": "pp send/recv",
    "dp": "dp reduce-scatter, all-gather",
    "outer": "outer steps' all-reduce",
    "host": "activations to the host and back",
}


def show_plan(
    resolution: Resolution,
    origins: Mapping[str, HasOrigin],
    tokens: float | None,
    as_json: bool,
    with_assumptions: bool,
) -> bool:
    """Print the plan of a resolved spec; return False if the run is not valid."""
    from megalaunch.plan.check import check
    from megalaunch.plan.findings import has_errors, sort_findings
    from megalaunch.plan.prediction import predict

    spec = resolution.spec
    findings = sort_findings([*check(spec, origins), *(f for f in resolution.notes if f.rule == _MACHINE)])
    try:
        prediction: Prediction | None = predict(spec, tokens)
        problem = ""
    except ValueError as error:
        prediction, problem = None, str(error)
    if prediction is not None and _is_refused(findings):
        prediction = prediction.without_time("the engine refuses this run (errors above)")
    if as_json:
        typer.echo(json.dumps(_as_json(spec, findings, prediction, with_assumptions), indent=2, default=str))
    else:
        typer.echo(_as_text(resolution, findings, prediction, problem, with_assumptions))
    return not has_errors(findings) and prediction is not None


def _is_refused(findings: Sequence[Finding]) -> bool:
    """Return whether the engine would not start the run for another reason than its memory."""
    return any(f.severity == "error" and not f.rule.startswith("memory.") for f in findings)


def _as_text(
    resolution: Resolution,
    findings: Sequence[Finding],
    prediction: Prediction | None,
    problem: str,
    with_assumptions: bool,
) -> str:
    from megalaunch.plan.cost import describe_kernels
    from megalaunch.plan.report import finding_block, run_table

    spec, cluster = resolution.spec, _cluster_text(resolution)
    shown = [f for f in findings if f.severity == "error" or f.rule in ("memory.fits", _MACHINE) or _is_planned(f)]
    if prediction is None:
        hint = "; give the vocabulary (model.vocab_size=N) or the data" if spec.model.vocab_size is None else ""
        shown = shown or [f for f in findings if f.severity == "warning"]
        return "\n\n".join([*(finding_block(f) for f in shown), *cluster, f"no plan: {problem}{hint}"])
    blocks = [finding_block(f) for f in shown]
    blocks += [run_table(spec, prediction.topology), *cluster]
    blocks.append("\n".join(["ranks", *table_lines(_group_row(groups) for groups in prediction.groups)]))
    blocks.append(_memory_text(prediction))
    if prediction.time:
        blocks.append("\n".join(["kernels", *table_lines(describe_kernels(spec, prediction.time.stack))]))
    blocks.append(_time_text(prediction) if prediction.time else f"time\n  not predicted: {prediction.why_no_time}")
    if prediction.experts:
        blocks.append(_experts_text(prediction.experts, prediction.time))
    if with_assumptions:
        blocks.append(_assumptions_text(spec))
    return "\n\n".join(blocks)


def _is_planned(finding: Finding) -> bool:
    """Return whether a warning is about what a plan depends on; others, such as those about data, matter at a start."""
    return finding.severity == "warning" and finding.path.split(".")[0] in _PLANNED


def _cluster_text(resolution: Resolution) -> list[str]:
    """Return where nodes and devices come from, if they were not given; nothing for workers on a CPU."""
    notes = [f for f in resolution.notes if f.path.startswith("cluster.") and resolution.spec.platform.chip != "cpu"]
    return ["\n".join(["cluster", *(f"  {f.path} = {f.message}" for f in notes)])] if notes else []


def _group_row(groups: Groups) -> tuple[str, ...]:
    shown = ", ".join(str(rank) for rank in groups.first[:8]) + (", ..." if groups.size > 8 else "")
    place = "within a node" if groups.inside_node else "between nodes"
    return f"{groups.axis} {groups.size}", f"{groups.count} groups", place, f"first group: {shown}"


def _memory_text(prediction: Prediction) -> str:
    memory = prediction.memory
    head = f"peak memory of a rank: {memory.parameters / 1e9:.2f} B parameters"
    if prediction.topology.pp > 1:
        head += f", pipeline rank {memory.rank}"
    head += f", {memory.phase}"
    rows = [(kind, f"{size / _GB:.2f} GB") for kind, size in memory.kinds.items()]
    rows.append(("total", f"{memory.total / _GB:.2f} GB"))
    lines = [head, *table_lines(rows, right=(1,))]
    if prediction.device_bytes is not None:
        part = memory.total / prediction.device_bytes
        lines.append(f"  {part:.0%} of {prediction.device_bytes / _GB:.1f} GB")
    if prediction.topology.pp > 1:
        each = ", ".join(f"{rank.total / _GB:.1f}" for rank in prediction.by_rank[:16])
        lines.append(f"  by pipeline rank: {each}{', ...' if len(prediction.by_rank) > 16 else ''} GB")
    if prediction.host_bytes:
        lines.append(f"  optimizer states in host memory: {prediction.host_bytes / _GB:.2f} GB per node")
    if prediction.offloaded_bytes:
        lines.append(f"  activations in host memory: {prediction.offloaded_bytes / _GB:.2f} GB per node")
    if prediction.checkpoint_host_bytes:
        lines.append(f"  checkpoints in host memory: {prediction.checkpoint_host_bytes / _GB:.2f} GB per node")
    return "\n".join(lines)


def _time_text(prediction: Prediction) -> str:
    time = prediction.time
    assert time is not None
    rows = [(name, f"{seconds:.3f} s", f"{seconds / time.total:.1%}", note) for name, seconds, note in _seconds(time)]
    lines = [f"step time: {time.total:.3f} s with the kernels of {time.stack.name}", *table_lines(rows, right=(1, 2))]
    budget, days = prediction.budget, prediction.days or 0.0
    speed = [
        (
            "model FLOPs per step",
            f"{prediction.flops:.4g} (with non-causal attention {prediction.full_flops:.4g})",
        ),
        ("tokens/s", f"{time.tokens_per_second_per_device:,.0f} per device, {time.tokens / time.total:,.0f} in total"),
        ("TFLOP/s per device", f"{time.flops_per_device / 1e12:,.0f}"),
        ("MFU", f"{time.mfu_causal:.1%} causal, {time.mfu_full:.1%} full, of {time.peak / 1e12:,.0f} TFLOP/s"),
        (f"{_tokens(budget)} tokens", f"{days:,.2f} days ({days * time.world * 24:,.0f} device-hours)"),
    ]
    return "\n".join([*lines, "", "speed", *table_lines(speed)])


def _experts_text(experts: ExpertWork, time: StepTime | None) -> str:
    """Return what the routed experts of the busiest rank take of the memory and the time above."""
    holders = f"{experts.edp} rank{'s' if experts.edp > 1 else ''} (edp)"
    rows = [
        ("parameters", f"{experts.parameters / _GB:.2f} B, on {holders}"),
        ("rows", f"{experts.rows:,.0f} per layer and microbatch"),
    ]
    if experts.dispatch_bytes:
        rows.append(("dispatch", f"{experts.dispatch_bytes / 1e6:,.1f} MB per layer and microbatch, and back"))
    if time:
        rows.append(("grouped matmuls", f"{time.grouped:.3f} s of the step's matmuls"))
        rows.append(("permutation", f"{time.permutation:.3f} s of its memory-bound kernels"))
    head = f"experts of the busiest rank, with {experts.imbalance:.4g} x the mean of the tokens"
    return "\n".join([head, *table_lines(rows)])


def _seconds(time: StepTime) -> Iterator[tuple[str, float, str]]:
    """Yield the rows of the time table: name, exposed seconds, overlapped seconds."""
    for name, label in _COMPUTE.items():
        if getattr(time, name):
            yield label, getattr(time, name), ""
    for axis, comm in time.communication.items():
        if comm.exposed + comm.hidden:
            yield _COMMUNICATION[axis], comm.exposed, f"and {comm.hidden:.3f} s overlapped"
    if time.bubble:
        yield "pipeline bubble", time.bubble, ""
    yield "optimizer", time.optimizer, ""


def _assumptions_text(spec: RunSpec) -> str:
    from megalaunch.plan.prediction import assumptions

    rows = [
        (entry.name, entry.value if isinstance(entry.value, str) else f"{entry.value:,.6g}", entry.source)
        for entry in assumptions(spec)
    ]
    return "\n".join(["assumptions", *table_lines(rows, right=(1,))])


def _tokens(count: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:,.4g}{unit}"
    return f"{count:,.0f}"


def _as_json(
    spec: RunSpec, findings: Sequence[Finding], prediction: Prediction | None, with_assumptions: bool
) -> dict[str, Any]:
    from megalaunch.plan.findings import as_json, has_errors
    from megalaunch.plan.prediction import assumptions
    from megalaunch.plan.summary import derived_values

    data: dict[str, Any] = {
        "valid": not has_errors(list(findings)),
        "findings": [as_json(f) for f in findings],
        "derived": derived_values(spec),
    }
    if prediction is None:
        return data
    memory, time = prediction.memory, prediction.time
    data["ranks"] = [{**vars(groups), "first": groups.first} for groups in prediction.groups]
    data["memory"] = {
        "bytes": memory.kinds,
        "total": memory.total,
        "device_bytes": prediction.device_bytes,
        "host_bytes_per_node": prediction.host_bytes,
        "offloaded_activation_bytes_per_node": prediction.offloaded_bytes,
        "checkpoint_host_bytes_per_node": prediction.checkpoint_host_bytes,
        "pipeline_rank": memory.rank,
        "phase": memory.phase,
        "parameters": memory.parameters,
        "total_by_pipeline_rank": [rank.total for rank in prediction.by_rank],
    }
    data["flops"] = {"step": prediction.flops, "step_full_attention": prediction.full_flops}
    data["experts"] = vars(prediction.experts) if prediction.experts else None
    data["time"] = _time_json(prediction, time) if time else None
    if time is None:
        data["why_no_time"] = prediction.why_no_time
    if with_assumptions:
        data["assumptions"] = [vars(entry) for entry in assumptions(spec)]
    return data


def _time_json(prediction: Prediction, time: StepTime) -> dict[str, Any]:
    return {
        "kernels": {"stack": time.stack.name, "meaning": time.stack.meaning},
        "step_seconds": time.total,
        "compute": {name: getattr(time, name) for name in _COMPUTE},
        "of_experts": {"grouped_matmuls": time.grouped, "permutation": time.permutation},
        "communication": {axis: vars(comm) for axis, comm in time.communication.items()},
        "bubble": time.bubble,
        "optimizer": time.optimizer,
        "tokens_per_second_per_device": time.tokens_per_second_per_device,
        "flops_per_device": time.flops_per_device,
        "mfu_causal": time.mfu_causal,
        "mfu_full": time.mfu_full,
        "budget_tokens": prediction.budget,
        "days": prediction.days,
    }
