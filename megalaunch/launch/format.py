"""Format numbers for people: the same in the display, the summary and the failure report."""

from __future__ import annotations

import math


def format_duration(seconds: float) -> str:
    """Format seconds as `45 s`, `3 min 05 s`, `2 h 07 min`."""
    if not math.isfinite(seconds):
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_memory(count: float) -> str:
    """Format bytes as `512 MiB`, `1.4 GiB`."""
    if not math.isfinite(count):
        return "-"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def format_file_size(count: float) -> str:
    """Format bytes as `72.3 MB`: decimal units, as for disks."""
    if not math.isfinite(count):
        return "-"
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def format_count(value: float) -> str:
    """Format a count as `12,345`."""
    return f"{value:,.0f}" if math.isfinite(value) else "-"


def format_flops(rate: float | None) -> str:
    """Format FLOP/s of one device as `412 TFLOP/s`, `85.3 GFLOP/s`."""
    if not rate or not math.isfinite(rate):
        return "- TFLOP/s"
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e11 else f"{rate / 1e9:.3g} GFLOP/s"


def format_loss(value: float) -> str:
    """Format a loss in nats with four decimals; NaN and infinity by name."""
    return f"{value:.4f}"
