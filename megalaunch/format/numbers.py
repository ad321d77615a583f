"""Format numbers for people: the same in every command, display, message and report.

Memory is in binary units (MiB, GiB), as drivers and the kernel report it; files and traffic are in decimal units
(MB, GB), as disks and networks are sold.
"""

from __future__ import annotations

import math

_DECIMAL = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_SHORT = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3))


def format_duration(seconds: float) -> str:
    """Format seconds as `45 s`, `3 min 05 s`, `2 h 07 min`."""
    if not math.isfinite(seconds):
        return "-"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"


def format_memory(count: float) -> str:
    """Format bytes of memory in binary units: `512 MiB`, `1.4 GiB`."""
    if not math.isfinite(count):
        return "-"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def format_bytes(count: float, digits: int = 1) -> str:
    """Format bytes of files or traffic in decimal units: `72.3 MB`."""
    if not math.isfinite(count):
        return "-"
    for unit, size in _DECIMAL:
        if count >= size:
            return f"{count / size:.{digits}f} {unit}"
    return f"{count:.0f} B"


def format_count(value: float) -> str:
    """Format a count as `12,345`."""
    return f"{value:,.0f}" if math.isfinite(value) else "-"


def format_short_count(count: int) -> str:
    """Format a count with three digits and a letter.

    >>> format_short_count(8_030_261_248), format_short_count(671_026_404_352), format_short_count(999_999)
    ('8.03B', '671B', '1.00M')
    """
    for letter, unit in _SHORT:
        if count >= 0.9995 * unit:
            value = count / unit
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}{letter}"
    return str(count)


def format_flops(rate: float | None) -> str:
    """Format FLOP/s of one device as `412 TFLOP/s`, `85.3 GFLOP/s`."""
    if not rate or not math.isfinite(rate):
        return "- TFLOP/s"
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e11 else f"{rate / 1e9:.3g} GFLOP/s"


def format_loss(value: float) -> str:
    """Format a loss in nats with four decimals; NaN and infinity by name."""
    return f"{value:.4f}"


def format_counted(count: object, noun: str) -> str:
    """Return a count with its noun, in the plural unless it is 1: "1 worker", "2 workers"."""
    return f"{count} {noun}{'' if str(count) == '1' else 's'}"
