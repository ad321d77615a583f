"""Feed one tracker from the files of a run, until the launcher closes this process's standard input.

python -m megalaunch.launch.trackers NAME RUN_DIR

What could not be sent is sent by the next launch: `trackers/NAME.json` has the run's id there and the last step sent.
"""

from __future__ import annotations

import json
import os
import re
import select
import sys
import threading
import time
from pathlib import Path

from megalaunch.fs import make_directory, write_file_atomically
from megalaunch.launch.run_state import throughput_basis
from megalaunch.launch.trackers.backends import open_tracker
from megalaunch.launch.trackers.figures import event_figures, phase_after, step_figures
from megalaunch.launch.trackers.process import END
from megalaunch.launch.trackers.tracker import Tracker, TrackerError
from megalaunch.rundir.events import record_event
from megalaunch.rundir.jsonl import Record
from megalaunch.rundir.metrics import is_task_evaluation, is_validation
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.redact import redact_output
from megalaunch.rundir.tail import JsonlTail
from megalaunch.schema.spec_file import read_spec

POLL_SECONDS = 1.0
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0  # after a failure, seconds
_ACCESS = re.compile(r"//[^/\s@]*@")  # user and password of an address
ORPHAN_SECONDS = 4.0  # from the launcher's death to the end of this process


class Feed:
    """Reads new records and sends them; a failure is recorded once as an event, and tried again later."""

    def __init__(self, name: str, directory: RunDirectory) -> None:
        self._name, self._directory = name, directory
        self._spec = read_spec(directory.spec)
        self._scale = throughput_basis(self._spec)
        self._state = directory.trackers / f"{name}.json"
        stored = self._read_state()
        self._run_id: str | None = stored.get("run_id")
        self._sent = {kind: int(stored.get(kind, 0)) for kind in ("step", "validation", "tasks")}
        self._events_sent = int(stored.get("events", 0))
        self._tracker: Tracker | None = None
        self._holds = False  # the tracker holds what has not been flushed
        self._metrics, self._events = JsonlTail(directory.metrics), JsonlTail(directory.events)
        self._waiting: list[tuple[str, Record]] = []
        self._step, self._events_read, self._restarts = self._sent["step"], 0, 0
        self._phase: Record | None = None
        self._pause, self._retry_at, self._told = FIRST_PAUSE, 0.0, False

    def send_new(self, last: bool = False) -> None:
        """Send what has been appended. `last`: now, even if the pause after a failure is not over."""
        self._read()
        if not (self._waiting or self._holds) or (time.monotonic() < self._retry_at and not last):
            return
        try:
            if self._tracker is None:
                self._tracker = open_tracker(self._name, self._spec, self._directory, self._run_id)
                self._run_id = self._tracker.run_id
            while self._waiting:
                self._send(self._tracker, *self._waiting[0])
                del self._waiting[0]
                self._holds = True
            self._tracker.flush()
            self._holds = False
            self._write_state()
            self._pause = FIRST_PAUSE
        except Exception as error:  # of any package, of a network, of a disk: training continues without it
            self._tell(error)
            self._retry_at = time.monotonic() + self._pause
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)

    def finish(self) -> None:
        """Send the rest and end the tracker's run."""
        self.send_new(last=True)
        if self._tracker is not None:
            try:
                self._tracker.finish()
                self._write_state()
            except Exception as error:
                self._tell(error)

    def _read(self) -> None:
        metrics, rewritten = self._metrics.read_new()
        if rewritten:  # steps after a checkpoint are trained again: those that were sent are not sent twice
            self._waiting = [waiting for waiting in self._waiting if waiting[0] == "event"]
        new = []
        for record in metrics:
            kind = "validation" if is_validation(record) else "tasks" if is_task_evaluation(record) else "step"
            if isinstance(step := record.get("step"), int) and step > self._sent[kind]:
                new.append((kind, record))
        for record in self._events.read_new()[0]:
            self._events_read += 1
            if self._events_read > self._events_sent:
                new.append(("event", record))
            else:
                self._restarts += record.get("event") == "restart"
                self._phase = phase_after(record, self._phase)
        self._waiting += sorted(new, key=lambda each: float(each[1].get("time", 0.0)))

    def _send(self, tracker: Tracker, kind: str, record: Record) -> None:
        step = int(record["step"]) if kind != "event" else self._step
        if kind == "event":
            restarts = self._restarts + (record.get("event") == "restart")
            figures = event_figures(record, restarts, self._phase)
        else:
            figures = step_figures(record, self._spec, self._scale)
            self._step = max(self._step, step)
        if figures:
            tracker.log(figures, step, float(record.get("time", time.time())))
        if kind == "event":
            tracker.log_event(record)
            self._restarts, self._events_sent = restarts, self._events_sent + 1
            self._phase = phase_after(record, self._phase)
        else:
            self._sent[kind] = max(self._sent[kind], step)

    def _tell(self, error: Exception) -> None:
        if self._told:
            return
        self._told = True
        cause = f"{type(error).__name__}: {_ACCESS.sub('//', str(error))[:500]}"
        why = str(error) if isinstance(error, TrackerError) else f"see {self._directory.tracker_log(self._name)}"
        message = f"warning: tracker {self._name} failed and is tried again while training continues: {why}"
        print(cause, file=sys.stderr, flush=True)
        try:
            record_event(self._directory, "note", message=message)
        except OSError as problem:
            print(problem, file=sys.stderr, flush=True)

    def _read_state(self) -> Record:
        try:
            stored = json.loads(self._state.read_text())
        except (OSError, ValueError):
            return {}
        return stored if isinstance(stored, dict) else {}

    def _write_state(self) -> None:
        state = json.dumps({"run_id": self._run_id, **self._sent, "events": self._events_sent})
        write_file_atomically(self._state, state + "\n", sync=False)


def main(name: str, root: Path) -> int:
    """Feed a tracker until the launcher says that the run has ended, or dies."""
    directory = RunDirectory(root)
    make_directory(directory.trackers)
    feed = Feed(name, directory)
    while True:
        readable, _, _ = select.select([0], [], [], POLL_SECONDS)
        if readable:
            if os.read(0, 16) != END:  # the launcher has died: nothing may outlive it for long
                threading.Timer(ORPHAN_SECONDS, os._exit, [1]).start()
            feed.finish()
            os._exit(0)  # threads of a package may wait for a server
        feed.send_new()


if __name__ == "__main__":
    redact_output()
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
