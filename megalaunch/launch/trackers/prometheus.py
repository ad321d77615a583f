"""Prometheus: the newest figures of a run in a textfile for node_exporter, and at an endpoint that it scrapes."""

from __future__ import annotations

import contextlib
import errno
import re
import threading
import time
from pathlib import Path

from megalaunch.fs import write_file_atomically
from megalaunch.http_access import TokenFileError, is_loopback, keep_token
from megalaunch.launch.page_server import Page, PageServer
from megalaunch.launch.trackers.tracker import Tracker, TrackerError
from megalaunch.rundir.events import record_event
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec

_FIXES = {
    errno.EADDRINUSE: "end the program that uses it, or set another logging.prometheus_port",
    errno.EADDRNOTAVAIL: "set logging.prometheus_host to an address of this machine",
}


class Exposition:
    """The newest figures of a run in Prometheus's text format, each a gauge with the label `run`; threads may share it.

    Args:
        run: name of the run.
    """

    def __init__(self, run: str) -> None:
        self._label = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._figures: dict[str, float] = {}

    def update(self, figures: dict[str, float], step: int, seconds: float) -> None:
        """Replace the figures that are given; `seconds` is the time since 1970."""
        self._figures = {**self._figures, **figures, "step": float(step), "updated": seconds or time.time()}

    def text(self) -> str:
        """Return a line of the type and one of the value for each figure."""
        lines = []
        for name, value in sorted(self._figures.items()):
            metric = "megalaunch_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            lines += [f"# TYPE {metric} gauge", f'{metric}{{run="{self._label}"}} {value!r}']
        return "".join(f"{line}\n" for line in lines)


class PrometheusTextfile(Tracker):
    """The newest figures in a file for node_exporter's textfile collector, replaced atomically."""

    run_id = "prometheus"

    def __init__(self, spec: RunSpec, directory: RunDirectory, run_id: str | None) -> None:
        assert spec.logging.prometheus_textfile is not None, "it is opened only if its path is set"
        self._path = Path(spec.logging.prometheus_textfile).absolute()
        self._exposition = Exposition(str(spec.run.name))

    def log(self, figures: dict[str, float], step: int, seconds: float) -> None:
        """Replace the file."""
        self._exposition.update(figures, step, seconds)
        # another user's node_exporter reads it
        write_file_atomically(self._path, self._exposition.text(), 0o644, sync=False)

    def finish(self) -> None:
        """Leave the last figures."""


class PrometheusEndpoint(Tracker):
    """The newest figures at `/metrics` until the launch ends; beyond the loopback interface for who has the token."""

    run_id = "prometheus_endpoint"

    def __init__(self, spec: RunSpec, directory: RunDirectory, run_id: str | None) -> None:
        """Listen, and name the address in an event. Raises TrackerError if that cannot be."""
        host, port = spec.logging.prometheus_host, spec.logging.prometheus_port
        assert port is not None, "it is opened only if its port is set"
        self._exposition = Exposition(str(spec.run.name))
        try:  # its owner may let the group of Prometheus read the token
            token = None if is_loopback(host) else keep_token(directory.prometheus_token, private=False)
        except TokenFileError as error:
            raise TrackerError(str(error)) from error
        try:
            self._server = _MetricsServer(host, port, token, self._exposition)
        except OSError as error:
            fix = _FIXES.get(error.errno or 0, "set another logging.prometheus_port")
            raise TrackerError(f"port {port} of {host} cannot be listened on ({error.strerror}): {fix}") from error
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()
        needs = "" if token is None else f", with the token in {directory.prometheus_token}"
        with contextlib.suppress(OSError):  # a full disk: the figures are served all the same
            record_event(directory, "note", message=f"metrics for Prometheus: {self._server.address}{needs}")

    def log(self, figures: dict[str, float], step: int, seconds: float) -> None:
        """Serve the figures from now on."""
        self._exposition.update(figures, step, seconds)

    def finish(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()


class _MetricsServer(PageServer):
    path = "/metrics"
    needs_token = "the metrics need the token of the run, as `authorization: credentials_file` of Prometheus"

    def __init__(self, host: str, port: int, token: str | None, exposition: Exposition) -> None:
        super().__init__(host, port, token)
        self._exposition = exposition

    def read_page(self) -> Page:
        """Return the newest figures."""
        return Page(self._exposition.text().encode(), "text/plain; version=0.0.4; charset=utf-8")
