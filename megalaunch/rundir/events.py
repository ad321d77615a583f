"""The events of a run: launcher and workers append to `events.jsonl` through `record_event`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megalaunch.rundir.jsonl import Record, append_line
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.redact import redact_record

EventName = Literal[
    "launch",
    "phase",
    "network",
    "attention",
    "override",
    "resumed",
    "overrides_changed",
    "metrics_cut",
    "metrics_gap",
    "checkpoint",
    "local_checkpoint",
    "progress",
    "checkpoint_refused",
    "zero_gradient",
    "skipped_step",
    "bad_step",
    "expert_collapse",
    "straggler",
    "early_stopping",
    "stop_requested",
    "worker_failed",
    "restart",
    "nodes_changed",
    "storage_wait",
    "storage_back",
    "note",
    "outcome",
]


@dataclass(frozen=True)
class EventKind:
    """What an event means; docs/reference/events.md is made from it.

    Attributes:
        writer: the process that writes it.
        when: the moment at which it is written.
        fields: the meaning of each field, besides `time` and `event`.
        optional: the fields that not every such event has.
    """

    writer: str
    when: str
    fields: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict)


_LAUNCHER, _RANK_0 = "the launcher", "rank 0"

EVENTS: Mapping[EventName, EventKind] = {
    "launch": EventKind(
        _LAUNCHER,
        "before the workers start; everything up to the next one belongs to this launch",
        {
            "overrides": "overrides of the command line",
            "workers": "number of worker processes of all nodes",
            "command": "command line of this node's agent",
        },
    ),
    "phase": EventKind(
        _RANK_0,
        "when a phase begins, such as loading, training, validating",
        {
            "phase": "name of the phase",
            "step": "last finished step",
            "elapsed_seconds": "seconds since the worker started",
        },
    ),
    "network": EventKind(
        _RANK_0,
        "when the network of a run on several nodes was measured, before it builds the model (`launcher.preflight`)",
        {
            "nodes": "number of nodes",
            "message_bytes": "size of the messages",
            "bandwidth": "of an all-reduce in GB/s: 2 (n-1)/n x size / time for n ranks, nccl-tests' bus bandwidth",
            "planned": "the same as `plan` counts it, where it knows the network",
            "slow_nodes": "nodes whose links to both neighbours have less than half the bandwidth of the fastest link",
            "slow_places": "these nodes and other slow links, with their hosts",
            "slow_bandwidth": "of the slowest link, of one device, in GB/s; null without one",
            "usual_bandwidth": "of the fastest link, of one device, in GB/s",
        },
    ),
    "attention": EventKind(
        _RANK_0,
        "once the model is built",
        {"backend": "`model.attention_backend`", "kernel": "kernel that it means in this run, and the reason"},
    ),
    "override": EventKind(
        _RANK_0,
        "once for each operator that another package replaces",
        {
            "operator": "name of the operator",
            "implementation": "name of the replacement",
            "vendor": "who provides it",
        },
    ),
    "resumed": EventKind(
        _RANK_0,
        "when a checkpoint has been loaded, also at a rewind",
        {"step": "step of the checkpoint", "checkpoint": "its path"},
    ),
    "overrides_changed": EventKind(
        _RANK_0,
        "after `resumed`, if operators have other overrides than when the checkpoint was saved",
        {"step": "step of the checkpoint", "changes": "list of sentences, one for each operator"},
    ),
    "metrics_cut": EventKind(
        _RANK_0,
        "when lines of metrics.jsonl after the loaded step are removed, as those steps are trained again",
        {
            "after_step": "last step whose line is kept",
            "lines": "number of removed lines",
            "last_step": "last step that had a line",
        },
    ),
    "metrics_gap": EventKind(
        _RANK_0,
        "at a resume, if steps before it have no line in metrics.jsonl (a power cut can lose them)",
        {
            "until_step": "step of the checkpoint",
            "missing": "number of steps without a line",
            "first": "first such step",
            "last": "last such step",
        },
    ),
    "checkpoint": EventKind(
        _RANK_0,
        "when a checkpoint is complete on disk",
        {
            "step": "its step",
            "path": "its path",
            "seconds": "seconds from the start of the save to its end",
            "waited_seconds": "seconds of these in which training waited",
        },
    ),
    "local_checkpoint": EventKind(
        _RANK_0,
        "when every rank has its shard in the memory or on the disk of its node (`checkpoint.memory`, `.local`)",
        {
            "step": "its step",
            "tier": "`memory` or `local`",
            "path": "folder of rank 0's node",
            "seconds": "seconds from the start of the save to its end",
            "waited_seconds": "seconds of these in which training waited",
            "copied": "whether each shard has a copy on another node",
        },
    ),
    "progress": EventKind(
        _RANK_0,
        "every few seconds of long file work: loading and saving",
        {
            "phase": "what is done",
            "step": "step of the checkpoint",
            "done": "finished part, in bytes of this rank",
            "total": "all of it, in bytes of this rank",
        },
    ),
    "checkpoint_refused": EventKind(
        _RANK_0,
        "when a checkpoint is damaged or incomplete; the one before it is tried",
        {"path": "its path", "reason": "what is wrong with which file"},
    ),
    "zero_gradient": EventKind(
        _RANK_0,
        "at the first step of a row whose gradient norm is exactly 0",
        {"step": "that step", "limit": "number of such steps in a row that end the run; 0: none"},
    ),
    "skipped_step": EventKind(
        _RANK_0,
        "when a step updates nothing: its gradients overflowed fp16, or their norm exceeds "
        "`optimizer.skip_step_grad_norm`",
        {
            "step": "that step",
            "loss_scale": "loss scale of the step; null without one",
            "grad_norm": "norm of the gradients; null if they overflowed",
        },
    ),
    "bad_step": EventKind(
        _RANK_0,
        "when a batch is left out because of a loss spike, or of a loss or gradient that is not finite",
        {
            "step": "that step",
            "reason": "what was found, with ranks and samples",
            "first": "first step whose batch is left out; `step` is the last one",
            "rewound_to": "step of the checkpoint that is loaded; null: no rewind",
            "count": "number of bad steps of the run so far",
            "limit": "`train.max_bad_steps`",
        },
    ),
    "expert_collapse": EventKind(
        _RANK_0,
        "when one expert of a layer got more than `train.expert_collapse_share` of its tokens for too many steps",
        {
            "step": "last of these steps",
            "layer": "number of the layer",
            "share": "part of the layer's tokens at that expert, 0 to 1",
            "steps": "number of such steps in a row",
        },
    ),
    "straggler": EventKind(
        _RANK_0,
        "when a rank is slow in three checks in a row (`train.straggler_interval`), once for each cause",
        {
            "step": "step of the third check",
            "cause": "`compute`: its device is slow; `cpu`: it waits for a CPU; `data`: it waits for tokens",
            "ranks": "the slow ranks",
            "nodes": "numbers of their nodes",
            "places": "where they are: up to eight ranks with their hosts, or hosts",
            "speed": "of the slowest: the median of all ranks is 1",
            "times": "seconds a step of each of these ranks since the last check, by phase: `data` (wait for tokens), "
            "`forward_backward`, `optimizer` (reduction of gradients, norm, update) and the whole `step`",
            "median_times": "the same for the median of all ranks",
        },
    ),
    "early_stopping": EventKind(
        _RANK_0,
        "when the run ends because its validation loss no longer improves",
        {
            "step": "last finished step",
            "metric": "loss that is watched",
            "best": "its lowest value",
            "best_step": "step of that value",
            "validations": "number of validations in a row without improvement",
        },
    ),
    "stop_requested": EventKind(
        f"{_LAUNCHER} and {_RANK_0}",
        "when a signal to stop arrives; a checkpoint is saved next",
        {"signal": "its name, such as SIGTERM"},
    ),
    "worker_failed": EventKind(
        f"the worker, or {_LAUNCHER} (on several nodes the agent) if the worker could not",
        "when a worker crashes, is killed or hangs",
        {
            "rank": "its rank",
            "coordinates": "its coordinates on the axes of the layout, such as `pp0 dp1`",
            "phase": "its last phase",
            "step": "its last finished step",
            "exception": "type of the exception, the signal, or `hang`",
            "message": "text of the exception, or meaning of the signal",
            "attempt": "number of restarts before it",
        },
        {"trace": "end of the traceback; not in an event of the launcher"},
    ),
    "restart": EventKind(
        f"{_LAUNCHER}, or the agent of node 0 where the agents restart the workers",
        "when all workers are started again after a failure",
        {
            "attempt": "number of this restart",
            "reason": "failure that led to it",
            "pause_seconds": "seconds that the launcher waits before it",
        },
    ),
    "nodes_changed": EventKind(
        _LAUNCHER,
        "when a run leaves out nodes that were lost, or takes them or others again (`launcher.min_nodes`)",
        {
            "nodes": "number of nodes from now on",
            "wanted": "`cluster.nodes`",
            "hosts": "names of their hosts, in the order of the nodes",
            "reason": "which nodes were lost and how, or are back; with Ray how many it has or has free",
        },
    ),
    "storage_wait": EventKind(
        f"{_RANK_0}, or {_LAUNCHER} where a write does not return",
        "when the run directory cannot be written and a wait for it begins; written once it can be",
        {
            "path": "what could not be written",
            "reason": "why, in the words of the system, or the bytes needed and free",
            "fix": "what ends the wait, in the imperative",
            "seconds_left": "seconds until the run ends (`run.storage_timeout`)",
        },
    ),
    "storage_back": EventKind(
        f"{_RANK_0}, or {_LAUNCHER} where a write did not return",
        "when such a wait has ended, since writing works again",
        {"path": "what could not be written", "reason": "why", "seconds": "seconds of the wait"},
    ),
    "note": EventKind(
        f"{_LAUNCHER}, {_RANK_0} or a tracker's process",
        "when something is worth a line and stops nothing: a tracker that failed, a profile that was written",
        {"message": "the line"},
    ),
    "outcome": EventKind(
        "the writer of outcome.json",
        "at the end of a launch",
        {"exit_code": "[exit code](exit-codes.md) of the launch", "reason": "how it ended, in one sentence"},
    ),
}
"""Every event: a test compares each writer's fields with this table."""


def make_event(event: EventName, **details: Any) -> Record:
    """Return an event with the wall-clock time in seconds since 1970, and without the secrets of the environment."""
    return {"time": time.time(), "event": event, **redact_record(details)}


def record_event(directory: RunDirectory, event: EventName, **details: Any) -> None:
    """Append one event. Raises OSError."""
    append_line(directory.events, make_event(event, **details))
