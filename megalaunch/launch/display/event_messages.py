"""Convert events to sentences: the lines that both displays show besides steps."""

from __future__ import annotations

from megalaunch.format.numbers import format_counted, format_duration
from megalaunch.format.paths import display_path
from megalaunch.rundir.jsonl import Record
from megalaunch.rundir.worker_failure import failure_from_event

_MEASURED = {"step": "all", "forward_backward": "forward+backward", "optimizer": "optimizer", "data": "data"}


def event_message(event: Record) -> str | None:
    """Return one line for an event, or None for an event that is not shown while the run continues."""
    match event.get("event"):
        case "launch":
            return f"starting {format_counted(event.get('workers'), 'worker')}"
        case "phase":
            return f"{event.get('phase')}{_elapsed_text(event)}"
        case "resumed":
            return f"resuming after step {event.get('step')} from {_path(event, 'checkpoint')}"
        case "overrides_changed":
            changes = event.get("changes")
            shown = "; ".join(map(str, changes)) if isinstance(changes, list) else "?"
            return f"warning: overrides have changed since the checkpoint of step {event.get('step')}: {shown}"
        case "metrics_cut":
            return _metrics_cut(event)
        case "metrics_gap":
            steps = f"{event.get('missing')} of the steps up to {event.get('until_step')}"
            return f"metrics.jsonl lacks {steps} (first missing: {event.get('first')}, last: {event.get('last')})"
        case "checkpoint":
            return f"checkpoint of step {event.get('step')} saved{_duration_text(event)}"
        case "checkpoint_refused":
            return f"checkpoint {_path(event, 'path')} is invalid and skipped: {event.get('reason')}"
        case "zero_gradient":
            limit = event.get("limit")
            after = f"; the run ends after {limit} such steps in a row" if limit else ""
            return (
                f"warning: the gradient norm of step {event.get('step')} is exactly 0: no parameter is updated{after}"
            )
        case "skipped_step":
            return _skipped(event)
        case "bad_step":
            return _bad_step(event)
        case "expert_collapse":
            return _collapsed(event)
        case "network":
            return _slow_network(event)
        case "straggler":
            return _slow_ranks(event)
        case "early_stopping":
            return _stopped_early(event)
        case "stop_requested":
            return f"{event.get('signal')} received: saving a checkpoint, then stopping"
        case "worker_failed":
            return failure_from_event(event).summary
        case "restart":
            pause = event.get("pause_seconds")
            when = f" in {format_duration(pause)}" if isinstance(pause, (int, float)) and pause > 0 else ""
            return f"restart {event.get('attempt')}{when}: {event.get('reason')}"
        case "nodes_changed":
            return _nodes_changed(event)
        case "storage_wait":
            path, reason, fix = (str(event.get(key)) for key in ("path", "reason", "fix"))
            return storage_warning(path, reason, fix, event.get("seconds_left"))
        case "storage_back":
            return storage_back(str(event.get("path")), event.get("seconds"))
        case "note":
            return str(event.get("message"))
        case _:
            return None


def storage_warning(path: str, reason: str, fix: str, seconds_left: object) -> str:
    """Return the line of a wait for storage that begins."""
    left = format_duration(seconds_left) if isinstance(seconds_left, (int, float)) else "some time"
    wait = f"the run waits {left} for it (run.storage_timeout)"
    return f"warning: {display_path(path)} cannot be written: {reason}: {fix}; {wait}"


def storage_back(path: str, seconds: object) -> str:
    """Return the line of a wait for storage that has ended."""
    after = f" after {format_duration(seconds)}" if isinstance(seconds, (int, float)) else ""
    return f"{display_path(path)} can be written again{after}"


def _path(event: Record, key: str) -> str:
    return display_path(str(event.get(key)))


def _metrics_cut(event: Record) -> str:
    after, last, lines = (event.get(key) for key in ("after_step", "last_step", "lines"))
    repeated = "they are"
    if isinstance(after, int) and isinstance(last, int):
        repeated = f"steps {after + 1} to {last} are" if last > after + 1 else f"step {last} is"
    return f"metrics after step {after} removed ({format_counted(lines, 'line')}): {repeated} trained again"


def _nodes_changed(event: Record) -> str:
    nodes, wanted = event.get("nodes"), event.get("wanted")
    shown = f"{nodes} of {wanted} nodes" if nodes != wanted else f"all {wanted} nodes"
    return f"the run continues on {shown}: {event.get('reason')}"


def _bad_step(event: Record) -> str:
    step, first, target = (event.get(key) for key in ("step", "first", "rewound_to"))
    batches = f"the batch of step {step} is" if first == step else f"the batches of steps {first} to {step} are"
    action = f"{batches} left out" if target is None else f"rewinding to step {target}, {batches} left out"
    return f"warning: {event.get('reason')}: {action} ({event.get('count')} of {event.get('limit')} bad steps)"


def _collapsed(event: Record) -> str:
    share = event.get("share")
    part = f"{share:.0%}" if isinstance(share, (int, float)) else "most"
    steps = format_counted(event.get("steps"), "step")
    return (
        f"warning: one expert of layer {event.get('layer')} gets {part} of the tokens, for {steps} in a row up to step "
        f"{event.get('step')}: balance the load (model.moe.balance_loss_coeff, model.moe.balance_bias)"
    )


def _slow_ranks(event: Record) -> str:
    speed, places, ranks = event.get("speed"), event.get("places"), event.get("ranks")
    shown = "; ".join(map(str, places)) if isinstance(places, list) else "a rank"
    part = f"{speed:.0%}" if isinstance(speed, (int, float)) else "less"
    several = "" if isinstance(ranks, list) and len(ranks) > 1 else "s"
    if event.get("cause") == "data":
        what = f"wait{several} for tokens and train{several} {part} of the time: look at the disk or mount of the data"
    elif event.get("cause") == "cpu":
        look = "look at other processes and CPU limits there"
        what = f"wait{several} for a CPU and train{several} {part} of the time: {look}"
    else:
        what = f"compute{several} at {part} of the usual speed: look at clock, temperature and other processes there"
    return f"warning: {shown} {what} (3 checks in a row up to step {event.get('step')}){_phase_times(event)}"


def _phase_times(event: Record) -> str:
    """Return the times of slow ranks, those of the slowest in each phase; nothing for an event without them."""
    times, usual = event.get("times"), event.get("median_times")
    if not isinstance(times, dict) or not isinstance(usual, dict):
        return ""
    shown = [f"{name} {max(times[phase]):.3f} ({usual[phase]:.3f})" for phase, name in _MEASURED.items()]
    return f"; seconds a step (median): {', '.join(shown)}"


def _skipped(event: Record) -> str:
    norm, scale = event.get("grad_norm"), event.get("loss_scale")
    if isinstance(norm, (int, float)):
        return f"step {event.get('step')} skipped: its gradient norm {norm:g} exceeds skip_step_grad_norm"
    at = f" at loss scale {scale:g}" if isinstance(scale, (int, float)) else ""
    return f"step {event.get('step')} skipped: its gradients overflow fp16{at}"


def _slow_network(event: Record) -> str | None:
    places, planned, measured = event.get("slow_places"), event.get("planned"), event.get("bandwidth")
    if isinstance(places, list) and places:
        slow, usual = event.get("slow_bandwidth"), event.get("usual_bandwidth")
        return (
            f"warning: {'; '.join(map(str, places))}: {slow} GB/s, where other links have {usual} GB/s: look at "
            "cables, adapters and other traffic there"
        )
    if isinstance(planned, (int, float)) and isinstance(measured, (int, float)) and measured < planned / 2:
        return (
            f"warning: an all-reduce over {event.get('nodes')} nodes has {measured} GB/s, where the plan counts "
            f"{planned} GB/s: see which network it takes (NCCL_DEBUG=INFO), or set cluster.node_bandwidth"
        )
    return None


def _stopped_early(event: Record) -> str:
    best = event.get("best")
    shown = f" of {best:.4f}" if isinstance(best, (int, float)) else ""
    return (
        f"early stopping after step {event.get('step')}: {event.get('metric')} has not improved for "
        f"{format_counted(event.get('validations'), 'validation')}; the best{shown} is that of step "
        f"{event.get('best_step')}"
    )


def _elapsed_text(event: Record) -> str:
    seconds = event.get("elapsed_seconds")
    return (
        f" ({format_duration(seconds)} since the start)" if isinstance(seconds, (int, float)) and seconds >= 1 else ""
    )


def _duration_text(event: Record) -> str:
    seconds, waited = event.get("seconds"), event.get("waited_seconds")
    if not isinstance(seconds, (int, float)):
        return ""
    is_async = isinstance(waited, (int, float)) and waited < seconds
    return f" ({seconds:.1f} s{f', training waited {waited:.1f} s' if is_async else ''})"
