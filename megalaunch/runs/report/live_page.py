"""The report of a run that changes: rendered again when a file of the run has changed and a reader asks."""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import dataclass

from megalaunch.launch.directory import run_is_locked
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs.report.content import read_content
from megalaunch.runs.report.page import render_report
from megalaunch.runs.sweep.folder import Metric

_METRIC: Metric = "validation_loss"  # ranks several runs; a live page has one
_LEAST_SECONDS = 2.0  # between two renderings
_SHARE = 10  # rendering takes at most a tenth of the time of one CPU core, which the run may need

Fingerprint = tuple[object, ...]


@dataclass(frozen=True)
class Rendering:
    """A page: UTF-8 HTML, and the strong entity tag (RFC 9110, section 8.8.3) of these bytes."""

    html: bytes
    tag: str


class LivePage:
    """The current report of a run; threads may share it.

    Attributes:
        renderings: how often the page was rendered.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.renderings = 0
        self._lock = threading.Lock()
        self._current: Rendering | None = None
        self._drawn_from: Fingerprint = ()
        self._not_before = 0.0  # of time.monotonic()

    def read(self) -> Rendering:
        """Return the page, at most a few seconds old.

        Raises SpecError or OSError if the run cannot be read, ImportError without matplotlib or Jinja2.
        """
        with self._lock:
            if self._current is None or time.monotonic() >= self._not_before:
                fingerprint = self._fingerprint()
                if self._current is None or fingerprint != self._drawn_from:
                    self._current = self._render()
                    self._drawn_from = fingerprint  # taken before reading: a later change is drawn next time
            return self._current

    def _render(self) -> Rendering:
        start = time.thread_time()  # CPU time: on a busy machine the page falls no further behind
        name = self.directory.root.resolve().name
        html = render_report(name, [read_content(self.directory, name)], _METRIC, live=True).encode()
        self.renderings += 1
        used = time.thread_time() - start
        imported = self.renderings == 1  # matplotlib and Jinja2, once
        self._not_before = time.monotonic() + max(_LEAST_SECONDS, 0.0 if imported else _SHARE * used)
        return Rendering(html, f'"{hashlib.sha256(html).hexdigest()[:32]}"')

    def _fingerprint(self) -> Fingerprint:
        """Return what changes whenever the page would."""
        run = self.directory
        files = (run.spec, run.metrics, run.events, run.outcome, run.expert_load, run.sample, run.checkpoints)
        stamps: list[object] = [run_is_locked(run)]
        for path in files:
            try:
                stat = path.stat()
                stamps.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
            except OSError:
                stamps.append(None)
        return tuple(stamps)
