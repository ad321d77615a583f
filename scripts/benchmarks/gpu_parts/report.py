"""The results as short tables."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gpu_parts.bars import Verdicts

Row = dict[str, Any]


def report(results: Sequence[Row], machine: str, card: str) -> str:
    """Return the tables of all parts that were measured, what failed and what was left out."""
    verdicts = Verdicts(card)
    measured = [row for row in results if not row.keys() & {"failed", "unsupported", "left_out"}]
    blocks = [
        [machine],
        list(_ceilings([row for row in measured if row["kind"] == "ceilings"])),
        list(_kernels([row for row in measured if row["kind"] == "kernels"], _ceiling_rates(measured))),
        list(_steps(measured, verdicts)),
        list(_checks([row for row in measured if row["kind"] == "checks"])),
        [
            f"failed: {row['kind']}: {row['case']}: {row['failed'].splitlines()[0]}"
            for row in results
            if "failed" in row
        ],
        [
            f"not on this device: {row['kind']}: {row['case']}: {row['unsupported']}"
            for row in results
            if "unsupported" in row
        ],
        list(_left_out(results)),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _left_out(results: Sequence[Row]) -> Iterator[str]:
    """What was not measured by reason, and the command that measures it."""
    names: dict[str, list[str]] = {}
    for row in results:
        if "left_out" in row:
            names.setdefault(row["left_out"], []).append(f"{row['kind']}: {row['case']}")
    if not names:
        return
    for why, cases in names.items():
        yield f"left out ({why}): {'; '.join(cases)}"
    words = shlex.join(case for cases in names.values() for case in cases)
    yield f"to measure what was left out: scripts/bench gpu --out DIR2 --only {words}"


def _ceiling_rates(measured: Iterable[Row]) -> dict[str, float]:
    """Return the ceilings by what a kernel names: "bf16" and "fp8" in TFLOP/s, "memory" in GB/s."""
    rates: dict[str, float] = {}
    for row in measured:
        if row["kind"] == "ceilings":
            name = "memory" if "gigabytes_per_second" in row else row["case"].split()[0]
            rates[name] = max(rates.get(name, 0.0), row.get("gigabytes_per_second", row.get("tflops", 0.0)))
    return rates


def _ceilings(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    yield "| ceiling | rate |"
    yield "| --- | ---: |"
    for row in rows:
        rate = f"{row['tflops']:,.1f} TFLOP/s" if "tflops" in row else f"{row['gigabytes_per_second']:,.1f} GB/s"
        yield f"| {row['case']} | {rate} |"


def _kernels(rows: Sequence[Row], ceilings: dict[str, float]) -> Iterator[str]:
    if not rows:
        return
    yield "| kernel | form | ms | of the ceiling | error |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for row in rows:
        for form, found in row["forms"].items():
            if "failed" in found:
                yield f"| {row['case']} | {form} | | | {found['failed'].replace('|', '/')} |"
                continue
            unit = "memory" if "gigabytes_per_second" in found else "fp8" if row["fp8"] and form != "bf16" else "bf16"
            rate = found.get("gigabytes_per_second", found.get("tflops"))
            share = f"{rate / ceilings[unit]:.0%}" if ceilings.get(unit) else ""
            yield f"| {row['case']} | {form} | {found['milliseconds']:.3f} | {share} | {found['error']:.1e} |"


def _steps(measured: Sequence[Row], verdicts: Verdicts) -> Iterator[str]:
    """Training steps, each beside bf16, transformers and the planner."""
    rows = {(row["kind"], row["case"]): row for row in measured if row["kind"] in ("training", "transformers")}
    if not rows:
        return
    yield (
        "| model, sequence, precision | tokens/s | to bf16 | to transformers | causal MFU | step s | planned | peak GB "
        "| planned | transformers |"
    )
    yield "| --- " + "| ---: " * 9 + "|"
    for (kind, case), row in rows.items():
        if kind == "training":
            cells = _cells_of_ours(row, rows.get((kind, case.replace("fp8", "bf16"))), verdicts)
            other = rows.get(("transformers", case))
            cells[1] = _ratio(row, other)
            cells.append("" if other is None else f"{other['peak_gb']:.1f}")
        else:
            case, cells = (
                f"transformers: {case}",
                ["", "", "", f"{row['step_seconds']:.3f}", "", f"{row['peak_gb']:.1f}", "", ""],
            )
        yield f"| {case} | {row['tokens_per_second']:,.0f} | {' | '.join(cells)} |".replace("  ", " ")
    if counts := verdicts.summary():
        yield ""
        yield counts


def _cells_of_ours(row: Row, in_bf16: Row | None, verdicts: Verdicts) -> list[str]:
    """Return the cells behind the tokens per second but for those of transformers."""
    to_bf16 = ""
    if in_bf16 is not None and in_bf16 is not row:
        ratio = row["tokens_per_second"] / in_bf16["tokens_per_second"]
        to_bf16 = f"{ratio:.2f}{verdicts.fp8_speed(row, ratio)}"
    mfu = f"{row['mfu_causal']:.1%}{verdicts.mfu(row)}" if "mfu_causal" in row else ""
    planned = ""
    if "planned_seconds" in row:
        error = row["planned_seconds"] / row["step_seconds"] - 1
        planned = f"{row['planned_seconds']:.3f}, {error:+.1%}{verdicts.time(error)}"
    error = row["planned_gb"] / row["peak_gb"] - 1
    memory = f"{row['planned_gb']:.1f}, {error:+.1%}{verdicts.memory(error)}"
    return [to_bf16, "", mfu, f"{row['step_seconds']:.3f}", planned, f"{row['peak_gb']:.1f}", memory]


def _ratio(row: Row, other: Row | None) -> str:
    return "" if other is None else f"{row['tokens_per_second'] / other['tokens_per_second']:.2f}"


def _checks(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row["case"] == "quickstart":
            last = row["last"]
            yield f"quickstart: loss {last['loss']:.4f} at step {last['step']}"
        elif "collected" in row:
            yield f"gpu tests: {row['collected']} collected"
        else:
            yield f"gpu tests: {row['tests']}, {len(row['failures'])} failed, {row['skipped']} skipped"
            yield from (f"  {name}: {message.strip().splitlines()[-1]}" for name, message in row["failures"].items())
