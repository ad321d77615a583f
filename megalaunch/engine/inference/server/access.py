"""Who may use the server: those that know its token, and on the loopback interface only by its own names."""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from megalaunch.engine.inference.server.api_error import ApiError
from megalaunch.http_access import is_loopback

OPEN_PATH = "/health"
"""The path that answers without the token, for those that watch over the server."""


class AccessCheck:
    """Refuses requests before anything of them is read.

    Args:
        app: What answers the others.
        token: The token; None: no token is needed.
        only_loopback: The server listens on the loopback interface: another host name is refused, since a web page
            could reach the server through a name of its own that points here (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, token: str | None, only_loopback: bool) -> None:
        self._app, self._token, self._only_loopback = app, token, only_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "http" and (error := self._refusal(Headers(scope=scope), scope["path"])) is not None:
            await JSONResponse(error.body(), error.status, error.headers)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, headers: Headers, path: str) -> ApiError | None:
        host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        if self._only_loopback and not is_loopback(host):
            return ApiError("this server answers only as localhost", status=403)
        if self._token is None or path == OPEN_PATH:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._token.encode()):
            return None
        return ApiError(
            "the request needs the token of this server, as the API key of the client (Authorization: Bearer TOKEN)",
            status=401,
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
