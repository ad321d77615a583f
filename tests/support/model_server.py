"""A server of a model in this process, and a client of it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from megalaunch.engine.inference.chat_template import find_chat_template
from megalaunch.engine.inference.load_model import LanguageModel
from megalaunch.engine.inference.server.app import ServedModel, make_app
from megalaunch.engine.inference.server.generation_thread import GenerationThread

TOKEN = "a-token"


@dataclass(frozen=True)
class Answer:
    """A response: its JSON, or the events of a stream."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events, in order; the last one is [DONE]."""
        lines = [line.removeprefix("data: ") for line in self.text.split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@dataclass(frozen=True)
class Client:
    """Sends requests to a server."""

    port: int
    thread: GenerationThread

    def send(self, method: str, path: str, body: object = None, **headers: str) -> Answer:
        """Send a request, by default with the token; `body` is sent as JSON, or as it is if it is bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        given = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
        try:
            connection.request(method, path, content, {name: value for name, value in given.items() if value})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read().decode())
        finally:
            connection.close()

    def open(self, path: str, **fields: object) -> http.client.HTTPConnection:
        """Send fields as JSON without reading the response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        connection.request("POST", f"/v1/{path}", json.dumps(fields), headers)
        return connection

    def post(self, path: str, **fields: object) -> Answer:
        """Send fields as JSON."""
        return self.send("POST", f"/v1/{path}", fields)


@contextmanager
def running_server(
    model: LanguageModel, max_num_seqs: int = 4, max_queue: int = 64, token: str | None = TOKEN, name: str = "tiny"
) -> Iterator[Client]:
    """A server on a free port of the loopback interface."""
    thread = GenerationThread(model, max_num_seqs, max_queue)
    served = ServedModel(name, model, thread, find_chat_template(model.files))
    app = make_app(served, token, True, 1_700_000_000)
    config = uvicorn.Config(app, http="h11", ws="none", lifespan="on", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        running.start()
        until = time.monotonic() + 30
        while not server.started and running.is_alive() and time.monotonic() < until:
            time.sleep(0.01)
        try:
            yield Client(listener.getsockname()[1], thread)
        finally:
            server.should_exit = True
            running.join(30)
            assert not running.is_alive()
