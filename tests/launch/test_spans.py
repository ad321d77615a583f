"""OpenTelemetry spans: made from a run's records, sent to a collector, kept in a file where there is none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from tracked_run import directory_of

from megalaunch.launch.trackers import __main__ as feeding
from megalaunch.rundir.events import record_event
from megalaunch.rundir.jsonl import append_line, read_lines
from megalaunch.rundir.paths import RunDirectory

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="OpenTelemetry (the extra `trackers`) is missing")
_REFUSED = "warning: tracker opentelemetry failed and is tried again while training continues: see "


@pytest.fixture(autouse=True)
def _no_address(monkeypatch):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "TRACEPARENT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    directory = directory_of(tmp_path / "run")
    directory.trackers.mkdir()
    return directory


def launch(directory: RunDirectory, at: float, first: int, exit_code: int = 0) -> None:
    """Add the records of a launch that trains four steps and has a restart."""
    for seconds, event, details in (
        (0, "launch", {"overrides": ["recipe=tiny"], "workers": 2, "command": ["x"]}),
        (1, "phase", {"phase": "building", "step": first - 1, "elapsed_seconds": 1.0}),
        (2, "phase", {"phase": "training", "step": first - 1, "elapsed_seconds": 2.0}),
        (5, "restart", {"attempt": 1, "reason": "rank 1 was killed", "pause_seconds": 0.0}),
        (6, "phase", {"phase": "training", "step": first + 1, "elapsed_seconds": 6.0}),
        (8.5, "checkpoint", {"step": first + 3, "path": "c", "seconds": 0.5, "waited_seconds": 0.0}),
        (9, "outcome", {"exit_code": exit_code, "reason": "finished"}),
    ):
        append_line(directory.events, {"time": at + seconds, "event": event, **details})
    for step, seconds in ((0, 3), (1, 4), (2, 7), (3, 8)):
        line = {"step": first + step, "loss": 2.0, "step_seconds": 1.0, "time": at + seconds}
        append_line(directory.metrics, line)


def spans_in(requests: list[dict]) -> list[dict]:
    return [span for request in requests for span in request["resourceSpans"][0]["scopeSpans"][0]["spans"]]


def tree(spans: list[dict]) -> list[tuple[str, str | None, float, float]]:
    """Name, parent's name, start and end in seconds of every span."""
    names = {span["spanId"]: span["name"] for span in spans}
    return [
        (span["name"], names.get(span.get("parentSpanId")), *(int(span[key]) / 1e9 for key in _TIMES)) for span in spans
    ]


_TIMES = ("startTimeUnixNano", "endTimeUnixNano")


def test_a_run_is_a_trace_with_a_span_for_each_launch_phase_and_group_of_steps(run):
    launch(run, 100.0, 1)
    feeding.Feed("opentelemetry", run).finish()
    launch(run, 200.0, 5, exit_code=5)
    feeding.Feed("opentelemetry", run).finish()
    requests = list(read_lines(run.trackers / "spans.jsonl"))
    spans = spans_in(requests)
    one = [
        ("launch", None, 0, 9),
        ("building", "launch", 1, 2),
        ("training", "launch", 2, 5),
        ("steps", "training", 2, 5),
        ("training", "launch", 6, 9),
        ("steps", "training", 6, 9),
        ("checkpoint", "launch", 8, 8.5),
    ]
    expected = [(*names, 100 + at + start, 100 + at + end) for at in (0, 100) for *names, start, end in one]
    assert sorted(tree(spans), key=str) == sorted(expected, key=str)
    assert len({span["traceId"] for span in spans}) == 1
    assert len(spans[0]["traceId"]) == 32
    first, second = (span["status"] for span in spans if span["name"] == "launch")
    assert (first, second) == ({"code": 1}, {"code": 2, "message": "finished"})
    (steps, _, _, _) = (span for span in spans if span["name"] == "steps")
    found = {each["key"]: each["value"] for each in steps["attributes"]}
    assert found["step.first"] == {"intValue": "1"}
    assert found["step.last"] == {"intValue": "2"}
    assert found["train.loss"] == {"doubleValue": 2.0}
    training = next(span for span in spans if span["name"] == "training")
    (event,) = training["events"]
    assert (event["name"], int(event["timeUnixNano"]) / 1e9) == ("restart", 105.0)
    assert {"key": "reason", "value": {"stringValue": "rank 1 was killed"}} in event["attributes"]
    resource = {each["key"]: each["value"] for each in requests[0]["resourceSpans"][0]["resource"]["attributes"]}
    assert resource["service.name"] == {"stringValue": "megalaunch"}
    assert resource["megalaunch.run.directory"] == {"stringValue": str(run.root)}


def test_every_ten_steps_are_a_span(run):
    launch(run, 100.0, 8)  # steps 8 to 11; log_interval is 10
    feeding.Feed("opentelemetry", run).finish()
    spans = spans_in(list(read_lines(run.trackers / "spans.jsonl")))
    ends = {each["key"]: each["value"] for span in spans if span["name"] == "steps" for each in span["attributes"]}
    assert [span["name"] for span in spans].count("steps") == 3  # 8 and 9, before the restart; 10; 11
    assert ends["step.last"] == {"intValue": "11"}


class Collector(HTTPServer):
    """Takes OTLP over HTTP; refuses with 400 while `refuses` is set."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.refuses = False
        self.names: list[str] = []
        self.traces: set[str] = set()


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.server.refuses:
            spans = ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans
            self.server.names += [span.name for span in spans]
            self.server.traces |= {span.trace_id.hex() for span in spans}
        self.send_response(400 if self.server.refuses else 200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture
def collector(monkeypatch) -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_collector_that_refuses_gets_every_span_once_later(run, collector, monkeypatch):
    collector.refuses = True
    launch(run, 100.0, 1)
    feed = feeding.Feed("opentelemetry", run)
    feed.send_new()
    assert collector.names == []
    (note,) = [line["message"] for line in read_lines(run.events) if line["event"] == "note"]
    assert note.startswith(_REFUSED)
    collector.refuses = False
    feed.finish()
    names = ["building", "checkpoint", "launch", "steps", "steps", "training", "training"]
    assert sorted(collector.names) == names
    assert not (run.trackers / "spans.jsonl").exists()


def test_spans_that_no_collector_took_are_in_the_file(run, collector, capfd):
    collector.refuses = True
    launch(run, 100.0, 1)
    feeding.Feed("opentelemetry", run).finish()
    names = {span["name"] for span in spans_in(list(read_lines(run.trackers / "spans.jsonl")))}
    assert "building" in names
    assert "took no spans" in capfd.readouterr().err


def test_the_spans_of_a_launch_join_the_trace_of_who_started_it(run, collector, monkeypatch):
    monkeypatch.setenv("TRACEPARENT", f"00-{'ab' * 16}-{'cd' * 8}-01")
    launch(run, 100.0, 1)
    feeding.Feed("opentelemetry", run).finish()
    assert collector.traces == {"ab" * 16}


def test_grpc_without_its_package_names_the_package_and_the_other_way(run, collector, monkeypatch, capfd):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    record_event(run, "launch", overrides=[], workers=1, command=[])
    feeding.Feed("opentelemetry", run).finish()
    said = capfd.readouterr().err
    assert "needs the package opentelemetry-exporter-otlp-proto-grpc; or set it to http/protobuf" in said
