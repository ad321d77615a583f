"""Serve one page over HTTP, for who knows its token: the live report of a run, the figures for Prometheus.

The token is in the query (as Jupyter's) or a bearer token (RFC 6750). A server that listens on the loopback interface
answers no other host name, against DNS rebinding. It reads only.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from megalaunch.http_access import is_loopback

_IDLE_SECONDS = 20.0  # a connection without a request
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageError(Exception):
    """The page cannot be made now; the text is the answer."""


@dataclass(frozen=True)
class Page:
    """What a reader gets. A reader that has the page of the same `tag` already gets no body."""

    body: bytes
    content_type: str
    tag: str | None = None


class PageServer(ThreadingHTTPServer, ABC):
    """The HTTP server of one page. `serve_forever` serves until `shutdown`; subclasses make the page.

    Attributes:
        path: of the page.
        content_security_policy: sent with every answer.
        needs_token: the answer to a request without the token.
        address: of the page, without the token.
        token: None: every request is answered.
    """

    daemon_threads = True
    path = "/"
    content_security_policy = "default-src 'none'"
    needs_token = "the address needs the token"

    def __init__(self, host: str, port: int, token: str | None) -> None:
        """Listen on an IP address; `port` 0 takes a free one. Raises OSError."""
        self.address_family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        super().__init__((host, port), _Request)
        self.only_loopback = is_loopback(host)
        self.token = token
        shown = f"[{host}]" if self.address_family == socket.AF_INET6 else host
        self.address = f"http://{shown}:{self.server_port}{self.path}"

    @abstractmethod
    def read_page(self) -> Page:
        """Return the page as it is now. Raises PageError."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a connection that its reader closed."""


class _Request(BaseHTTPRequestHandler):
    """One request; refusals come before anything of the run is read."""

    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_SECONDS

    def do_GET(self) -> None:
        """Answer with the page, or with 304 if the reader has it."""
        if self.server.only_loopback and not is_loopback(self._host()):
            return self._answer(403, "this server answers only as localhost")
        if not self._knows_token():
            return self._answer(401, self.server.needs_token)
        if urlsplit(self.path).path != self.server.path:
            return self._answer(404, f"there is one page: {self.server.path}")
        try:
            page = self.server.read_page()
        except PageError as error:
            return self._answer(503, str(error))
        headers = {} if page.tag is None else {"ETag": page.tag}
        if page.tag is not None and self.headers.get("If-None-Match") == page.tag:
            return self._send(304, b"", headers)
        return self._send(200, page.body, {"Content-Type": page.content_type, **headers})

    do_HEAD = do_GET

    def _knows_token(self) -> bool:
        if self.server.token is None:
            return True
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = parse_qs(urlsplit(self.path).query).get("token", [""])[0]
        return hmac.compare_digest(given.encode(), self.server.token.encode())

    def _host(self) -> str:
        return urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""

    def _answer(self, status: int, text: str) -> None:
        headers = {"Content-Type": "text/plain; charset=utf-8"}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        self._send(status, f"{text}\n".encode(), headers)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", self.server.content_security_policy)
        if status != 304:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a malformed request or another method than GET and HEAD, under the same headers."""
        self.close_connection = True
        self._answer(code, message or "")

    def version_string(self) -> str:
        """Return the Server header: no versions."""
        return "megalaunch"

    def log_message(self, format: str, *args: object) -> None:
        """Write no log: it would hold the token."""
