"""The results as short tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

Row = dict[str, Any]


def report(results: Sequence[Row], machine: str) -> str:
    """Return the tables of all parts that were measured, what failed and what was left out."""
    measured = [row for row in results if not row.keys() & {"failed", "left_out"}]
    blocks = [
        [machine],
        list(_ceilings([row for row in measured if row["kind"] == "ceilings"])),
        list(_kernels([row for row in measured if row["kind"] == "kernels"], _ceiling_rates(measured))),
        list(_steps(measured)),
        list(_checks([row for row in measured if row["kind"] == "checks"])),
        [
            f"failed: {row['kind']}: {row['case']}: {row['failed'].splitlines()[0]}"
            for row in results
            if "failed" in row
        ],
        [f"left out: {row['kind']}: {row['case']}: {row['left_out']}" for row in results if "left_out" in row],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


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


def _steps(measured: Sequence[Row]) -> Iterator[str]:
    rows = [row for row in measured if row["kind"] in ("training", "transformers")]
    if not rows:
        return
    yield "| model, sequence, precision | tokens/s | causal MFU | planned | step s | planned | peak GB | planned |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for row in rows:
        ours = row["kind"] == "training"
        name = row["case"] if ours else f"transformers: {row['case']}"
        planned = row.get("planned_seconds")
        mfu = f"{row['mfu_causal']:.1%}" if "mfu_causal" in row else ""
        planned_mfu = f"{row['mfu_causal'] * row['step_seconds'] / planned:.1%}" if planned and mfu else ""
        seconds = f"{planned:.3f}" if planned else ""
        memory = f"{row['planned_gb']:.1f}" if ours else ""
        yield (
            f"| {name} | {row['tokens_per_second']:,.0f} | {mfu} | {planned_mfu} | {row['step_seconds']:.3f} "
            f"| {seconds} | {row['peak_gb']:.1f} | {memory} |"
        )


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
