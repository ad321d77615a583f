"""OpenTelemetry: one trace for a run, with a span for each launch, phase, group of steps and checkpoint.

    launch                                status ERROR if it failed
    ├── building, training, saving, ...   a phase; restarts, bad steps, stragglers and notes are its events
    │   └── steps                         `logging.log_interval` steps, with the figures of the last one
    └── checkpoint                        from the start of a save to its end, also of an asynchronous one

Spans are sent by OTLP to OTEL_EXPORTER_OTLP_ENDPOINT. Without an address they are written to `trackers/spans.jsonl` as
OTLP in JSON, which the OpenTelemetry Collector's `otlpjsonfile` receiver reads; so are those that could not be sent.
"""

from __future__ import annotations

import contextlib
import json
import os
from base64 import b64decode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Status, StatusCode, set_span_in_context

from megalaunch.fs import append_line, make_directory
from megalaunch.rundir.jsonl import Record
from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec

_ADDRESSES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_STRUCTURE = ("launch", "phase", "outcome", "checkpoint", "progress")  # events that are spans, or their ends
_NO_FAILURE = (ExitCode.DONE, ExitCode.PREEMPTED, ExitCode.INTERRUPTED)


class OpenTelemetryTracker:
    """Spans made from the records of a run, with the times that the records have.

    Attributes:
        run_id: The trace id, as 32 hexadecimal digits. With TRACEPARENT in the environment (W3C trace context) the
            spans of this launch belong to that trace instead.
    """

    def __init__(self, spec: RunSpec, directory: RunDirectory, run_id: str | None) -> None:
        ids = _TraceOfRun(run_id)
        self.run_id = format(ids.trace_id, "032x")
        resource = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME", "megalaunch"),
                "megalaunch.run.name": str(spec.run.name),
                "megalaunch.run.directory": str(directory.root.absolute()),
            }
        )
        self._sender = _Sender(directory.trackers / "spans.jsonl")
        provider = TracerProvider(resource=resource, id_generator=ids, shutdown_on_exit=False)
        provider.add_span_processor(self._sender)
        self._tracer = provider.get_tracer("megalaunch")
        self._outside = extract({"traceparent": os.environ.get("TRACEPARENT", "")})
        self._interval = spec.logging.log_interval
        self._launch: Span | None = None
        self._phase: Span | None = None
        self._steps: Span | None = None
        self._now = 0.0

    def log(self, figures: dict[str, float], step: int, seconds: float) -> None:
        """Add the figures of a step to the span of its group, and other figures to the span of the phase."""
        self._now = max(self._now, seconds)
        attributes = {name.replace("/", "."): value for name, value in figures.items()}
        duration = figures.get("time/step_seconds")
        if duration is None:
            if (span := self._phase or self._launch) is not None:
                span.set_attributes(attributes)
            return
        if self._steps is None:
            self._steps = self._start("steps", self._phase or self._launch, seconds - duration, {"step.first": step})
        self._steps.set_attributes({**attributes, "step.last": step})
        if step % self._interval == 0:
            self._end_steps(seconds)

    def log_event(self, record: Record) -> None:
        """Begin and end the spans that an event tells of; other events become events of the phase's span."""
        name, seconds = str(record.get("event")), float(record["time"])
        self._now = max(self._now, seconds)
        details = _attributes({key: value for key, value in record.items() if key not in ("event", "time")})
        match name:
            case "launch":
                self._end_launch(seconds)
                self._launch = self._start("launch", None, seconds, details)
            case "phase":
                self._end_phase(seconds)
                self._phase = self._start(str(record["phase"]), self._launch, seconds, details)
            case "checkpoint":
                span = self._start("checkpoint", self._launch, seconds - float(record.get("seconds", 0.0)), details)
                span.end(_nanoseconds(seconds))
            case "restart":
                self._add_event(name, details, seconds)
                self._end_phase(seconds)
            case "outcome":
                self._end_launch(seconds, details)
            case _ if name not in _STRUCTURE:
                self._add_event(name, details, seconds)

    def flush(self) -> None:
        """Send the spans that have ended. Raises ConnectionError; the next call sends them again."""
        self._sender.send()

    def finish(self) -> None:
        """End the open spans with the last record, and send them; what cannot be sent is written to the file."""
        self._end_launch(self._now)
        self._sender.finish()

    def _start(self, name: str, parent: Span | None, seconds: float, attributes: Mapping[str, Any]) -> Span:
        context = self._outside if parent is None else set_span_in_context(parent)
        span = self._tracer.start_span(name, context, start_time=_nanoseconds(seconds), attributes=dict(attributes))
        assert isinstance(span, Span), "the provider is the SDK's"
        return span

    def _add_event(self, name: str, attributes: Mapping[str, Any], seconds: float) -> None:
        if (span := self._phase or self._launch) is not None:
            span.add_event(name, attributes, _nanoseconds(seconds))

    def _end_steps(self, seconds: float) -> None:
        if self._steps is not None:
            self._steps.end(_nanoseconds(seconds))
            self._steps = None

    def _end_phase(self, seconds: float) -> None:
        self._end_steps(seconds)
        if self._phase is not None:
            self._phase.end(_nanoseconds(seconds))
            self._phase = None

    def _end_launch(self, seconds: float, outcome: Mapping[str, Any] | None = None) -> None:
        self._end_phase(seconds)
        if self._launch is None:
            return
        if outcome is not None:
            self._launch.set_attributes(outcome)
            failed = outcome.get("exit_code") not in _NO_FAILURE
            reason = str(outcome.get("reason", ""))
            self._launch.set_status(Status(StatusCode.ERROR, reason) if failed else Status(StatusCode.OK))
        self._launch.end(_nanoseconds(seconds))
        self._launch = None


class _TraceOfRun(RandomIdGenerator):  # type: ignore[misc]  # the package is optional
    """Gives every span without a parent the trace of the run."""

    def __init__(self, run_id: str | None) -> None:
        self.trace_id = super().generate_trace_id() if run_id is None else int(run_id, 16)

    def generate_trace_id(self) -> int:
        """Return the trace id of the run."""
        return self.trace_id


class _Sender(SpanProcessor):  # type: ignore[misc]
    """Holds ended spans until they are sent."""

    def __init__(self, path: Path) -> None:
        self._path, self._ended, self._failed = path, list[ReadableSpan](), False
        self._exporter = _exporter() if any(os.environ.get(name) for name in _ADDRESSES) else None

    def on_end(self, span: ReadableSpan) -> None:
        """Hold a span that has ended."""
        self._ended.append(span)

    def send(self) -> None:
        """Send the spans that have ended, or write them. Raises ConnectionError; the next call sends them again."""
        if not self._ended:
            return
        if self._exporter is None:
            self._write()
            return
        self._failed = self._exporter.export(self._ended) is not SpanExportResult.SUCCESS
        if self._failed:
            raise ConnectionError(f"the collector at {' or '.join(_ADDRESSES)} took no spans, see above")
        self._ended.clear()

    def finish(self) -> None:
        """Send the rest, or write it if the collector did not take it."""
        if not self._failed:  # else it has just been tried, and a run's end should not wait twice
            with contextlib.suppress(ConnectionError):
                self.send()
        if self._ended:
            self._write()

    def _write(self) -> None:
        make_directory(self._path.parent)
        append_line(self._path, (json.dumps(_otlp_json(self._ended), ensure_ascii=False) + "\n").encode())
        self._ended.clear()


def _exporter() -> SpanExporter:
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), "http/protobuf")
    if protocol == "grpc":
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
        except ImportError as error:
            raise ModuleNotFoundError(
                "OTEL_EXPORTER_OTLP_PROTOCOL=grpc needs the package opentelemetry-exporter-otlp-proto-grpc; "
                "or set it to http/protobuf, whose port is usually 4318"
            ) from error
        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _otlp_json(spans: Sequence[ReadableSpan]) -> Any:
    """Return an OTLP request in JSON: as protobuf's JSON, but with ids as hexadecimal digits and enums as numbers."""
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    request = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
    for resource in request["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for key in ("traceId", "spanId", "parentSpanId"):
                    if key in span:
                        span[key] = b64decode(span[key]).hex()
    return request


def _attributes(details: Mapping[str, Any]) -> dict[str, Any]:
    """Return details of an event as attributes: scalars as they are, lists and mappings as JSON."""
    scalar = (str, bool, int, float)
    found = {key: value for key, value in details.items() if value is not None}
    return {key: value if isinstance(value, scalar) else json.dumps(value) for key, value in found.items()}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
