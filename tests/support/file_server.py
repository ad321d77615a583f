"""A loopback web server of files with ETags and ranges, whose answers can be made to fail."""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer:
    """Serves `files` by name; the next answers have the statuses of `failures`, 0 being a body that ends early."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.failures: list[int] = []
        self.requests = 0
        self.ranges = True
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.requests += 1
        body = self.files.get(request.path.partition("?")[0].removeprefix("/"))
        failure = self.failures.pop(0) if self.failures and request.command == "GET" else None
        status = 404 if body is None else failure or 200
        headers = {} if body is None else {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}
        content = body if status == 200 and body is not None else b""
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        if wanted and self.ranges and status == 200:
            status, content = 206, content[int(wanted[1]) : int(wanted[2]) + 1]
            headers["Content-Range"] = f"bytes {wanted[1]}-{int(wanted[1]) + len(content) - 1}/{len(body)}"
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            request.send_header(name, value)
        request.end_headers()
        with contextlib.suppress(ConnectionError):  # of a client that has read enough
            if request.command == "GET":
                request.wfile.write(content[: len(content) // 2] if failure == 0 else content)
