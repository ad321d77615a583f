"""How far a long piece of work is: drawn over itself on a terminal, and nowhere else."""

from __future__ import annotations

import sys

import pytest

from megalaunch.cli import share_shown as module
from megalaunch.cli.share_shown import share_shown


@pytest.fixture
def terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(module, "_EVERY", -1.0)


def test_a_terminal_sees_the_share_and_what_comes_after(terminal, capsys):
    show = share_shown("out", after="out: written, now the proof")
    show(1, 4)
    show(4, 4)
    assert capsys.readouterr() == ("", "\rout:  25%\r\rout: written, now the proof\r")


def test_what_comes_after_covers_the_share(terminal, capsys):
    show = share_shown("a long name", after="done")
    show(4, 4)
    assert capsys.readouterr().err == f"\r{'done':17}\r"
    assert len("a long name: 100%") == 17


def test_nothing_is_shown_twice_in_a_moment(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    share_shown("out")(1, 4)
    assert capsys.readouterr().err == ""


def test_a_file_sees_nothing(monkeypatch, capsys):
    monkeypatch.setattr(module, "_EVERY", -1.0)
    share_shown("out", after="then")(4, 4)
    assert capsys.readouterr() == ("", "")
