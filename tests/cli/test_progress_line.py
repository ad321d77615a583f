"""How far a long piece of work is: drawn over itself on a terminal, and nowhere else."""

from __future__ import annotations

import sys

from megalaunch.cli.output import progress as module
from megalaunch.cli.output.progress import percent_progress


def _on_a_terminal(monkeypatch, every: float = -1.0) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(module, "_EVERY", every)


def test_a_terminal_sees_the_share_and_what_comes_after(monkeypatch, capsys):
    _on_a_terminal(monkeypatch)
    show = percent_progress("out", after="out: written, now the proof")
    show(1, 4)
    show(4, 4)
    assert capsys.readouterr() == ("", "\rout:  25%\r\rout: written, now the proof\r")


def test_what_comes_after_covers_the_share(monkeypatch, capsys):
    _on_a_terminal(monkeypatch)
    percent_progress("a long name", after="done")(4, 4)
    assert capsys.readouterr().err == f"\r{'done':{len('a long name: 100%')}}\r"


def test_nothing_is_shown_twice_in_a_moment(monkeypatch, capsys):
    _on_a_terminal(monkeypatch, every=60.0)
    percent_progress("out")(1, 4)
    assert capsys.readouterr().err == ""


def test_a_file_sees_nothing(monkeypatch, capsys):
    monkeypatch.setattr(module, "_EVERY", -1.0)
    percent_progress("out", after="then")(4, 4)
    assert capsys.readouterr() == ("", "")
