"""What counts as a secret in a text, in a record of a run and in the output of a process."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from megalaunch.rundir.redact import redact, redact_output, redact_record

SECRET = "s3cr3tValue0123456789abcdef"


@pytest.mark.parametrize(
    "text",
    [
        f"WANDB_API_KEY={SECRET}",
        f"password: {SECRET}",
        f'{{"client_secret": "{SECRET}"}}',
        f"AWS_ACCESS_KEY_ID={SECRET}",
        f"--hub-token {SECRET} --steps 3",
        f"Authorization: Bearer {SECRET}",
        f"https://me:{SECRET}@example.org/x",
        "hf_" + "aB3" * 8,
        "ghp_" + "aB3" * 12,
        "sk-" + "aB3" * 8,
        "AKIA" + "ABCD" * 4,
        "eyJhbGciOi.eyJzdWIi.c2lnbmF0dXJl",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nMIIE\n",
    ],
)
def test_a_secret_is_recognised_by_its_name_or_form(text):
    shown = redact(text)
    assert "[redacted]" in shown
    for part in (SECRET, "aB3aB3", "ABCDABCD", "c2lnbmF0dXJl", "MIIE"):
        assert part not in shown


@pytest.mark.parametrize("text", ["HF_TOKEN=hf_" + "aB3" * 8, f"api_key: {SECRET}", 'token="hf_' + "aB3" * 8 + '"'])
def test_a_secret_that_has_both_is_replaced_once(text):
    shown = redact(text)
    assert (redact(shown), shown.count("["), shown.count("]")) == (shown, 1, 1)


@pytest.mark.parametrize(
    "text",
    ["tokens_per_second: 3913", "data.validation_tokens=100", "tokenizer.path=t.json", "tokens 675,840", "key=3"],
)
def test_settings_of_a_run_are_kept(text):
    assert redact(text) == text


def test_the_home_directory_is_not_named():
    assert redact(f"{Path.home()}/runs/a") == "~/runs/a"


def test_a_record_loses_the_values_of_the_environment_at_any_depth_and_nothing_else(monkeypatch):
    record = {"message": f"401: {SECRET}!", "rank": 1, "lines": [f"x {SECRET}"], "more": {"password": "told"}}
    assert redact_record(record) == record
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("SHORT_TOKEN", "told")
    clean = {"message": "401: [redacted]!", "rank": 1, "lines": ["x [redacted]"], "more": {"password": "told"}}
    assert redact_record(record) == clean


def test_output_loses_the_longest_value_first(monkeypatch):
    monkeypatch.setenv("A_TOKEN", SECRET[:10])
    monkeypatch.setenv("B_TOKEN", SECRET)
    stream = io.StringIO()
    out = io.TextIOWrapper(io.BytesIO(), write_through=True)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", stream)
    redact_output()
    print("one", SECRET, f"-{SECRET[:10]}-")
    assert out.buffer.getvalue() == b"one [redacted] -[redacted]-\n"
