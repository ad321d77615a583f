"""The Prometheus endpoint: newest figures over real HTTP, and a token beyond the loopback interface."""

from __future__ import annotations

import re
import socket
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from launching import events_of, wait_until
from tracked_run import directory_of
from training import training

from megalaunch.launch.trackers import __main__ as feeding
from megalaunch.rundir.events import record_event
from megalaunch.rundir.jsonl import append_line, read_lines
from megalaunch.rundir.paths import RunDirectory

_LINE = re.compile(r'(?P<name>megalaunch_[a-zA-Z0-9_]+)\{run="(?P<run>(?:[^"\\\n]|\\[\\"n])*)"\} (?P<value>\S+)')


def scrape(port: int, token: str | None = None, host: str = "127.0.0.1") -> tuple[str, str]:
    """The content type and text of /metrics."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with urlopen(Request(f"http://{host}:{port}/metrics", headers=headers), timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def parsed(text: str) -> dict[str, float]:
    """The gauges of an exposition; each has its type before it, a label and a number, and there is nothing else."""
    lines = text.splitlines()
    found = {}
    for kind, line in zip(lines[::2], lines[1::2], strict=True):
        match = _LINE.fullmatch(line)
        assert match is not None, line
        assert kind == f"# TYPE {match['name']} gauge"
        found[match["name"]] = float(match["value"])
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fed(folder, **logging: object) -> tuple[feeding.Feed, RunDirectory]:
    """What feeds the endpoint of a launch that has just begun."""
    directory = directory_of(folder / "run", **{f"logging__{key}": value for key, value in logging.items()})
    directory.trackers.mkdir()
    record_event(directory, "launch", overrides=[], workers=1, command=[])
    return feeding.Feed("prometheus_endpoint", directory), directory


def test_a_token_file_that_was_changed_is_named(tmp_path):
    feed, directory = fed(tmp_path, prometheus_port=free_port(), prometheus_host="0.0.0.0")
    directory.prometheus_token.write_text("one\ntwo\n")
    feed.send_new()
    (note,) = events_of(directory, "note")
    assert f"{directory.prometheus_token} holds no single token: write one line" in note["message"]
    feed.finish()


def test_other_machines_need_the_token_of_the_run(tmp_path):
    port = free_port()
    feed, directory = fed(tmp_path, prometheus_port=port, prometheus_host="0.0.0.0")
    feed.send_new()
    token = directory.prometheus_token.read_text().strip()
    assert directory.prometheus_token.stat().st_mode & 0o777 == 0o600
    (note,) = events_of(directory, "note")
    address = f"http://0.0.0.0:{port}/metrics"
    assert note["message"] == f"metrics for Prometheus: {address}, with the token in {directory.prometheus_token}"
    assert token not in directory.events.read_text()
    append_line(directory.metrics, {"step": 3, "loss": 0.5})
    feed.send_new()
    for given in (None, "", token[:-1]):
        with pytest.raises(HTTPError) as refused:
            scrape(port, given)
        assert (refused.value.code, refused.value.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert parsed(scrape(port, token)[1])["megalaunch_train_loss"] == 0.5
    feed.finish()
    with pytest.raises(OSError, match="refused"):
        scrape(port, token)
    record_event(directory, "launch", overrides=[], workers=1, command=[])
    resumed = feeding.Feed("prometheus_endpoint", directory)  # the configuration of Prometheus names the same token
    resumed.send_new()
    assert parsed(scrape(port, token)[1]).keys() == {
        f"megalaunch_{name}" for name in ("run_restarts", "step", "updated")
    }
    resumed.finish()


def test_a_port_in_use_is_one_warning_that_names_the_fix_and_is_tried_again(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        feed, directory = fed(tmp_path, prometheus_port=port)
        append_line(directory.metrics, {"step": 1, "loss": 2.0})
        feed.send_new()
        monkeypatch.setattr(feed, "_retry_at", 0.0)
        feed.send_new()
    (note,) = events_of(directory, "note")
    assert note["message"] == (
        "warning: tracker prometheus_endpoint failed and is tried again while training continues: port "
        f"{port} of 127.0.0.1 cannot be listened on (Address already in use): end the program that uses it, "
        "or set another logging.prometheus_port"
    )
    monkeypatch.setattr(feed, "_retry_at", 0.0)
    feed.send_new()
    assert parsed(scrape(port)[1])["megalaunch_train_loss"] == 2.0
    assert not directory.prometheus_token.exists()  # the loopback interface needs none
    feed.finish()


@pytest.mark.slow
def test_a_run_is_scraped_while_it_trains_and_holds_what_the_textfile_holds(tmp_path):
    port, textfile = free_port(), tmp_path / "run.prom"
    run = RunDirectory(tmp_path / "run")
    overrides = ("train.steps=150", f"logging.prometheus_port={port}", f"logging.prometheus_textfile={textfile}")
    with training(tmp_path, *overrides) as process:
        wait_until(lambda: events_of(run, "note") if run.events.exists() else [], 60)
        wait_until(lambda: "megalaunch_train_loss{" in scrape(port)[1], 120)
        kind, text = scrape(port)
        figures = parsed(text)
        assert kind == "text/plain; version=0.0.4; charset=utf-8"
        written = {int(record["step"]): record for record in read_lines(run.metrics) if "loss" in record}
        assert figures["megalaunch_train_loss"] == written[int(figures["megalaunch_step"])]["loss"]
        with pytest.raises(HTTPError, match="403"):  # a page of another site whose name leads here
            urlopen(Request(f"http://127.0.0.1:{port}/metrics", headers={"Host": "evil.example"}), timeout=10)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    assert f"metrics for Prometheus: http://127.0.0.1:{port}/metrics\n" in out
    assert parsed(textfile.read_text()).keys() >= figures.keys()
