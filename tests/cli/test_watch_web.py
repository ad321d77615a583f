"""`megalaunch watch --web`: the report of a run as a page that follows it, for who knows its token."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from browser import DESKTOP, PHONE, open_browser
from slow_cases import slow_but
from tiny_run import tiny_spec
from typer.testing import CliRunner
from warm_process import MEGALAUNCH

from megalaunch.cli.app import app
from megalaunch.rundir.events import record_event
from megalaunch.rundir.jsonl import append_line
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs.report import live_page
from megalaunch.runs.report.live_page import LivePage
from megalaunch.runs.report.live_server import LiveServer
from megalaunch.schema import with_values
from megalaunch.schema.spec_file import write_spec


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run after three of twenty steps."""
    directory = RunDirectory(tmp_path / "base")
    directory.checkpoints.mkdir(parents=True)
    values = {"cluster.nodes": 1, "cluster.devices_per_node": 1, "train.steps": 20}
    write_spec(with_values(tiny_spec(), values), directory.spec)
    record_event(directory, "launch", overrides=["train.steps=20"], workers=1, command=[])
    record_event(directory, "phase", phase="training", step=0)
    add_steps(directory, 1, 4)
    return directory


def add_steps(run: RunDirectory, first: int, end: int) -> None:
    for step in range(first, end):
        figures = {"loss": 5 - 0.1 * step, "tokens": 128 * step, "tokens_per_second": 1000.0, "memory_bytes": 2**30}
        append_line(run.metrics, {"step": step, **figures})


@pytest.fixture(autouse=True)
def draw_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(live_page, "_SHARE", 0)


@contextmanager
def serving(run: RunDirectory, host: str = "127.0.0.1") -> Iterator[LiveServer]:
    with LiveServer(LivePage(run), host) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: LiveServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def test_only_who_knows_the_token_reads_anything(run):
    with serving(run) as server:
        known = f"/?token={server.token}"
        assert ask(server, known)[0] == ask(server, "/", Authorization=f"Bearer {server.token}")[0] == 200
        for path in ("/", "/?token=", "/?token=" + "x" * 43, "/?token=" + server.token[:-1], "/nothing", "/?other=1"):
            status, headers, body = ask(server, path)
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer"), path
            assert body == "the address needs the token that megalaunch watch printed: /?token=...\n"
        assert ask(server, "/", Authorization="Bearer \udcff".encode("utf-8", "replace").decode())[0] == 401
        assert ask(server, f"/spec.yaml?token={server.token}")[0] == 404
        assert ask(server, known, "POST")[0] == 501
        assert ask(server, known, "HEAD")[2] == ""
        assert server.page.renderings == 1


def test_a_strange_host_name_is_refused(run):
    """Or a page of another site could read ours after it pointed its own name to 127.0.0.1."""
    with serving(run) as server:
        known = f"/?token={server.token}"
        assert ask(server, known, Host="evil.example")[0] == 403
        assert ask(server, known, Host="127.0.0.1.evil.example:80")[0] == 403
        assert ask(server, known, Host="localhost:8000")[0] == 200  # the other end of ssh -L
        assert ask(server, known, Host="[::1]:8000")[0] == 200
    with serving(run, "0.0.0.0") as server:
        assert ask(server, f"/?token={server.token}", Host="node7.example")[0] == 200
        assert ask(server, "/", Host="node7.example")[0] == 401


def test_every_answer_has_the_strict_headers(run):
    with serving(run) as server:
        for path in (f"/?token={server.token}", "/", f"/x?token={server.token}"):
            _, headers, _ = ask(server, path, Origin="https://evil.example")
            assert not [name for name in headers if name.startswith("Access-Control")]
            policy = headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'; img-src data:;")
            assert "connect-src 'self'" in policy
            assert "script-src 'sha256-" in policy
            assert headers["Cache-Control"] == "no-store"
            assert headers["X-Frame-Options"] == "DENY"
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"
            assert headers["Server"] == "megalaunch"


def test_the_page_follows_the_run_and_is_drawn_only_when_it_changed(run):
    with serving(run) as server:
        known = f"/?token={server.token}"
        _, headers, body = ask(server, known)
        assert "<dd>3 of 20</dd>" in body
        assert ask(server, known, If_None_Match=headers["ETag"])[::2] == (304, "")
        assert server.page.renderings == 1
        add_steps(run, 4, 8)
        status, _, body = ask(server, known, If_None_Match=headers["ETag"])
        assert status == 200
        assert "<dd>7 of 20</dd>" in body
        run.spec.write_text("nonsense: [")
        status, _, body = ask(server, known)
        assert status == 503
        assert body.startswith("the run cannot be read now: ")


def test_drawing_takes_a_small_part_of_a_core(run, monkeypatch):
    monkeypatch.setattr(live_page, "_LEAST_SECONDS", 3600.0)
    page = LivePage(run)
    first = page.read()
    add_steps(run, 4, 8)
    assert page.read() is first
    assert page.renderings == 1


@pytest.mark.parametrize(("computed", "waited", "drawn"), [(0.0, 5.0, 3), (0.5, 0.0, 2)])
def test_only_computing_counts_as_drawing(run, monkeypatch, computed, waited, drawn):
    """Neither waiting for a busy core, nor the first time, which imports matplotlib: the page would stand still."""
    clock = SimpleNamespace(cpu=0.0, now=0.0, thread_time=lambda: clock.cpu, monotonic=lambda: clock.now)
    monkeypatch.setattr(live_page, "time", clock)
    monkeypatch.setattr(live_page, "_SHARE", 10)

    def draw(*_: object, **__: object) -> str:
        clock.cpu += computed
        clock.now += computed + waited
        return f"drawn at {clock.now}"

    monkeypatch.setattr(live_page, "render_report", draw)
    page = LivePage(run)
    for step in (4, 5, 6):
        page.read()
        add_steps(run, step, step + 1)
    assert page.renderings == drawn


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--host", "0.0.0.0"], "leave --host out and use ssh -L, or add --allow-remote"),
        (["--host", "192.168.7.7"], "other machines would reach the page at 192.168.7.7"),
        (["--host", "node7"], "--host node7 is no IP address: give one, such as 127.0.0.1"),
        (["--host", "203.0.113.7", "--allow-remote"], "cannot be listened on"),
    ],
)
def test_an_address_that_is_refused(run, options, expected):
    result = CliRunner().invoke(app, ["watch", "--web", str(run.root), *options])
    assert result.exit_code == 2
    assert expected in result.stderr


def test_the_missing_extra_is_named(run):
    code = (
        "import sys\nsys.modules['matplotlib'] = None\n"
        "from megalaunch.cli.main import main\nsys.argv[0] = 'megalaunch'\nmain()"
    )
    command = [sys.executable, "-c", code, "watch", "--web", str(run.root)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr == "error: matplotlib is not installed, and draws the page: pip install 'megalaunch[train]'\n"


@contextmanager
def command(run: RunDirectory) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own, and the address that it prints."""
    process = subprocess.Popen([*MEGALAUNCH, "watch", "--web", str(run.root)], stdout=subprocess.PIPE, text=True)
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def test_the_command_listens_on_loopback_until_it_is_interrupted(run):
    with command(run) as (process, address):
        port = urlsplit(address).port
        listening = [
            line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if f":{port:04X} " in line
        ]
        assert listening[0] == f"0100007F:{port:04X}"
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"nonsense\r\n\r\n")
            assert connection.recv(100) == b"Bad request syntax ('nonsense')\n"  # as HTTP/0.9: without headers
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        rest = process.stdout.read()  # not `communicate`, which loses what `readline` has read beyond its line
        assert f"ssh -L {port}:127.0.0.1:{port} " in rest
        assert rest.endswith("the page has ended\n")


@pytest.mark.parametrize("width", slow_but([PHONE, DESKTOP], PHONE))
def test_a_browser_shows_the_run_as_it_grows(run, width):
    with command(run) as (process, address), open_browser(width) as browser:
        browser.open(address)
        browser.wait("document.getElementById('live').textContent.startsWith('live, as of')")
        browser.run("window.opened = true; document.querySelectorAll('details').forEach(it => it.open = true);")
        assert browser.run("return document.querySelectorAll('dd')[1].textContent;") == "3 of 20"
        curve = browser.run("return document.querySelector('img').src;")
        assert browser.overflow() == 0
        add_steps(run, 4, 11)
        record_event(run, "checkpoint", step=10, seconds=0.1)
        browser.wait("document.querySelectorAll('dd')[1].textContent == '10 of 20'")
        assert browser.run("return document.querySelector('img').src;") != curve
        assert browser.run("return window.opened && [...document.querySelectorAll('details')].some(it => it.open);")
        assert browser.run("return [...document.images].every(it => it.naturalWidth > 0);")
        assert browser.complaints() == []
        process.kill()
        browser.wait("document.getElementById('live').classList.contains('lost')")
        assert "megalaunch watch does not answer; the page is of" in browser.run(
            "return document.getElementById('live').textContent;"
        )
