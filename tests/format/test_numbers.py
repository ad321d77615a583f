"""Numbers for people: three digits or a fixed number of decimals, and a unit."""

from __future__ import annotations

import pytest

from megalaunch.format.numbers import format_bytes, format_duration, format_memory, format_short_count


def test_files_are_in_decimal_units():
    assert [format_bytes(count) for count in (3, 4.2e3, 72.3e6, 84.2e9, 1.5e12)] == [
        "3 B", "4.2 kB", "72.3 MB", "84.2 GB", "1.5 TB",
    ]  # fmt: skip
    assert format_bytes(1_234_567_890, digits=2) == "1.23 GB"


def test_memory_is_in_binary_units():
    assert [format_memory(b) for b in (2**20, 3 * 2**29)] == ["1 MiB", "1.5 GiB"]


def test_durations():
    assert [format_duration(s) for s in (0.4, 59, 59.7, 65, 7625, float("nan"))] == [
        "0 s", "59 s", "1 min 00 s", "1 min 05 s", "2 h 07 min", "-",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (39_072, "39.1K"),
        (999_400, "999K"),
        (999_500, "1.00M"),
        (8_030_261_248, "8.03B"),
        (9_995_000_000, "10.0B"),
        (99_950_000_000, "100B"),
        (682_636_472_320, "683B"),
        (1_040_000_000_000, "1.04T"),
    ],
)
def test_short_counts(count, text):
    assert format_short_count(count) == text
