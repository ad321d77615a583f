"""Serve the live report of a run over HTTP: one page, for who knows the token of its address.

Every request needs the token, in the query (as Jupyter's) or as a bearer token (RFC 6750). Without --allow-remote
the server listens on the loopback interface only and answers no other host name, against DNS rebinding. It reads only.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from megalaunch.runs.report.live_page import LivePage
from megalaunch.runs.report.page import content_security_policy
from megalaunch.schema import SpecError

_IDLE_SECONDS = 20.0  # a connection without a request
_TOKEN_BYTES = 32
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class LiveServer(ThreadingHTTPServer):
    """The HTTP server of one live page. `serve_forever` serves until `shutdown`.

    Attributes:
        url: the address of the page, with its token.
    """

    daemon_threads = True

    def __init__(self, page: LivePage, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen on an IP address; `port` 0 takes a free one. Raises OSError."""
        self.address_family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        super().__init__((host, port), _Request)
        self.page = page
        self.only_loopback = is_loopback(host)
        self.token = secrets.token_urlsafe(_TOKEN_BYTES)
        shown = f"[{host}]" if self.address_family == socket.AF_INET6 else host
        self.url = f"http://{shown}:{self.server_port}/?token={self.token}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a connection that its reader closed."""


def is_loopback(host: str) -> bool:
    """Return whether `host` is an address of the loopback interface, or its name `localhost`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Request(BaseHTTPRequestHandler):
    """One request; refusals come before anything of the run is read."""

    server: LiveServer
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_SECONDS

    def do_GET(self) -> None:
        """Answer with the page, or with 304 if the reader has it."""
        if self.server.only_loopback and not is_loopback(self._host()):
            return self._answer(403, "this server answers only as localhost")
        if not self._knows_token():
            return self._answer(401, "the address needs the token that megalaunch watch printed: /?token=...")
        if urlsplit(self.path).path != "/":
            return self._answer(404, "there is one page: /")
        try:
            rendering = self.server.page.read()
        except (SpecError, OSError) as error:
            return self._answer(503, f"the run cannot be read now: {error}")
        if self.headers.get("If-None-Match") == rendering.tag:
            return self._send(304, b"", {"ETag": rendering.tag})
        return self._send(200, rendering.html, {"Content-Type": "text/html; charset=utf-8", "ETag": rendering.tag})

    do_HEAD = do_GET

    def _knows_token(self) -> bool:
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

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (_HEADERS | headers).items():
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", content_security_policy(live=True))
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
