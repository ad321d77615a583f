"""The progress line: redrawn in place in a terminal; elsewhere lines at an interval, or nothing."""

from __future__ import annotations

import sys

from megalaunch.cli.output.progress import ProgressLine, percent_progress


def in_a_terminal(monkeypatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)


def test_a_terminal_shows_the_percentage_and_what_comes_after(monkeypatch, capsys):
    in_a_terminal(monkeypatch)
    show = percent_progress("out", after="out: written, verifying", interval=0.0)
    show(1, 4)
    show(4, 4)
    assert capsys.readouterr() == ("", "\r\033[Kout:  25%\r\r\033[Kout: written, verifying\r")


def test_a_finished_task_leaves_nothing_on_the_terminal(monkeypatch, capsys):
    in_a_terminal(monkeypatch)
    show = percent_progress("a long name", interval=0.0)
    show(1, 4)
    show(4, 4)
    assert capsys.readouterr().err.endswith("\r\033[K")


def test_updates_wait_for_the_interval(monkeypatch, capsys):
    in_a_terminal(monkeypatch)
    percent_progress("out", interval=60.0)(1, 4)
    assert capsys.readouterr().err == ""


def test_a_file_gets_no_progress_without_a_log_interval(capsys):
    show = percent_progress("out", after="then", interval=0.0)
    show(1, 4)
    show(4, 4)
    assert capsys.readouterr() == ("", "")


def test_a_file_gets_plain_lines_at_the_log_interval(capsys):
    line = ProgressLine(log_interval=0.0)
    assert line.due
    line.show("1 MB")
    line.clear()
    assert capsys.readouterr().err == "1 MB\n"
