"""The part of a kubelet that an API server asks for the output of a pod: files of a folder over HTTPS."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit


class PodLogs(ThreadingHTTPServer):
    """Serves `NAME.log` of a folder as the output of pod NAME; a pod that has ended is named in `ended`."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.folder = folder
        self.ended: set[str] = set()
        self.closing = threading.Event()


class _Request(BaseHTTPRequestHandler):
    server: PodLogs

    def do_GET(self) -> None:
        """Answer /containerLogs/NAMESPACE/POD/CONTAINER?follow=true."""
        asked = urlsplit(self.path)
        pod = asked.path.split("/")[3]
        path = self.server.folder / f"{pod}.log"
        if not path.exists():
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        with path.open("rb") as log:
            while True:
                last = "follow" not in parse_qs(asked.query) or pod in self.server.ended or self.server.closing.is_set()
                self.wfile.write(log.read())
                self.wfile.flush()
                if last:
                    return
                time.sleep(0.1)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing."""


@contextmanager
def pod_logs(folder: Path, certificate: Path, key: Path) -> Iterator[PodLogs]:
    """Serve the logs of a folder until the end of the block."""
    server = PodLogs(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
