"""Format findings and plans, as text for people and as JSON for programs; plain text, for any terminal."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from megalaunch.format.paths import display_path
from megalaunch.format.table import table_lines
from megalaunch.plan.batch import get_rampup, tokens_per_step, tokens_requested
from megalaunch.plan.findings import Finding, Severity, as_json, has_errors
from megalaunch.plan.memory.loss_chunks import LOGITS_LIMIT, count_loss_chunks, microbatch_tokens
from megalaunch.plan.overrides import overrides_row
from megalaunch.plan.parameters import count_parameters
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec, SpecProblem

_WIDTH = 116

COMPOSITION = "config.schema"
"""The rule of problems of composition."""


def problems_as_findings(problems: Sequence[SpecProblem], severity: Severity = "error") -> list[Finding]:
    """Convert problems of composition to findings."""
    return [Finding(COMPOSITION, severity, p.path, p.message, origin=p.where) for p in problems]


def problems_text(problems: Sequence[SpecProblem]) -> str:
    """Return problems of composition as text."""
    return findings_text(problems_as_findings(problems))


def uncomposed_text(problems: Sequence[SpecProblem]) -> str:
    """Return problems of composition as text, for a command that checks the rules of what is composed."""
    return problems_text(problems) + rules_wait(len(problems))


def rules_wait(problems: int) -> str:
    """Return the end of a summary: no rule has been checked, because of so many problems of composition."""
    return f"; the rules are checked once {'they are' if problems > 1 else 'it is'} corrected"


def findings_text(findings: Sequence[Finding], derived: Mapping[str, Any] | None = None) -> str:
    """Return errors and warnings with their fixes, notes, derived values, and a line with the result."""
    blocks = [finding_block(finding) for finding in findings if finding.severity != "note"]
    notes = [f"  {f.path} = {f.message}" for f in findings if f.rule == "derived"]
    notes += [f"  {f.message}" for f in findings if f.severity == "note" and f.rule != "derived"]
    if notes:
        blocks.append("\n".join(["notes", *notes]))
    if derived:
        blocks.append("\n".join(["derived", *table_lines([(k, _number(v)) for k, v in derived.items()])]))
    return "\n\n".join([*blocks, _summary_line(findings)])


def findings_json(findings: Sequence[Finding], derived: Mapping[str, Any]) -> str:
    """Return one object: valid, findings, derived."""
    valid = not has_errors(list(findings))
    return json.dumps(
        {"valid": valid, "findings": [as_json(f) for f in findings], "derived": dict(derived)}, indent=2, default=str
    )


def run_table(spec: RunSpec, topology: Topology, train_tokens: int | None = None) -> str:
    """Return a table of the run about to start, of a resolved spec: model, layout, batch, length, data, directory.

    `train_tokens` is the size of the prepared training data, if known.
    """
    rows = [
        ("model", _model(spec)),
        ("layout", _layout(spec, topology)),
        ("precision", f"{spec.precision.compute_dtype}, gradients reduced in {spec.precision.grad_reduce_dtype}"),
        ("batch", _batch(spec, topology)),
        *_loss(spec),
        ("length", _length(spec, train_tokens)),
        ("data", _data(spec)),
        *overrides_row(spec),
        *(("from the Hub" if index == 0 else "", name) for index, name in enumerate(spec.run.hub_revisions)),
        ("run", display_path(str(spec.run.directory))),
    ]
    return "\n".join(table_lines(rows))


def _data(spec: RunSpec) -> str:
    data = spec.data
    return str(data.corpus or data.sft_data or data.train_prefix or ", ".join(data.blend) or "mock tokens")


def _model(spec: RunSpec) -> str:
    model = spec.model
    size = f"{count_parameters(model).total:,} parameters, " if model.vocab_size is not None else ""
    heads = f"{model.num_attention_heads} heads in {model.num_query_groups} groups"
    shape = f"{model.num_layers} layers, hidden {model.hidden_size}, {heads}"
    vocabulary = "open until the tokenizer is given" if model.vocab_size is None else _number(model.vocab_size)
    return f"{model.name}: {size}{shape}, vocabulary {vocabulary}"


def _batch(spec: RunSpec, topology: Topology) -> str:
    factors = f"micro {topology.micro_batch_size} x dp {topology.dp} x {topology.microbatches} microbatches"
    sizes = f"sequence {spec.batch.sequence_length}; {tokens_per_step(spec):,} tokens per step"
    ramp = "" if spec.batch.rampup_batch_size is None else f"; rampup from {get_rampup(spec)[0].samples} samples"
    return f"{spec.batch.global_batch_size} = {factors}; {sizes}{ramp}"


def _loss(spec: RunSpec) -> list[tuple[str, str]]:
    """Return the row of a loss in chunks; none of a loss of all tokens at once."""
    chunks = count_loss_chunks(spec)
    size = -(-microbatch_tokens(spec) // chunks)
    chosen = "" if spec.train.loss_chunks else f", for at most {LOGITS_LIMIT >> 20} MiB of logits at once"
    return [("loss", f"in {chunks} chunks of {size:,} tokens{chosen}")] if chunks > 1 else []


def _length(spec: RunSpec, train_tokens: int | None) -> str:
    tokens = tokens_requested(spec)
    epochs = f" ({tokens / train_tokens:.2f} epochs of {train_tokens:,})" if train_tokens else ""
    return f"{spec.train.steps:,} steps, {tokens:,} tokens{epochs}"


def _layout(spec: RunSpec, topology: Topology) -> str:
    where = f"{topology.nodes} x {topology.devices_per_node} {spec.platform.chip}"
    axes = _degrees(topology, "dp", "pp", "cp", "tp") or "1 rank"
    if spec.model.moe.num_experts and topology.ep * topology.etp > 1:
        axes += f"; experts {_degrees(topology, 'edp', 'ep', 'etp')}"
    copies = spec.parallel.dp_replicate
    replicas = f" in each of {copies} replicas" if copies > 1 else ""
    return f"{where}: {axes}, data sharding {spec.parallel.data_sharding}{replicas}"


def _degrees(topology: Topology, *axes: str) -> str:
    """Return the degrees above 1 of one grid, as `dp 8 x pp 4`."""
    return " x ".join(f"{axis} {getattr(topology, axis)}" for axis in axes if getattr(topology, axis) > 1)


def finding_line(finding: Finding) -> str:
    """Return rule and message in one line, with the key where the message does not name it."""
    key = f"{finding.path}: " if finding.rule == COMPOSITION else ""
    return f"{finding.rule}: {key}{finding.message}"


def finding_block(finding: Finding) -> str:
    """Return the lines of one error or warning: key and rule, message, origin, fixes, and how to explain the rule."""
    lines = [f"{finding.severity}: {finding.path}  [{finding.rule}]"]
    lines += textwrap.wrap(finding.message, _WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    if finding.origin:
        lines.append(f"  from: {finding.origin}")
    if finding.fixes:
        lines.append("  fix:  " + "   or   ".join(finding.fixes))
    if finding.rule != COMPOSITION:  # its message is complete
        lines.append(f"  why:  megalaunch explain {finding.rule}")
    return "\n".join(lines)


def _number(value: Any) -> str:
    """Format a number with thousands separators; a list with repeats counted (`15, 6 x 16, 15`)."""
    if isinstance(value, list):
        runs = [(item, len(list(same))) for item, same in itertools.groupby(value)]
        shown = [f"{count} x {_number(item)}" if count > 1 else _number(item) for item, count in runs]
        return ", ".join(shown if len(shown) <= 12 else [*shown[:11], "..."])
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _summary_line(findings: Sequence[Finding]) -> str:
    counts = [(sum(f.severity == kind for f in findings), kind) for kind in ("error", "warning")]
    shown = [f"{count} {kind}{'s' if count > 1 else ''}" for count, kind in counts if count]
    if counts[0][0]:
        return ", ".join(shown)
    return "valid" + (f", {shown[0]}" if shown else "")
