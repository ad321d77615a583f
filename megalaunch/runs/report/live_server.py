"""Serve the live report of a run over HTTP: one page, for who knows the token of its address."""

from __future__ import annotations

import secrets

from megalaunch.http_access import TOKEN_BYTES
from megalaunch.launch.page_server import Page, PageError, PageServer
from megalaunch.runs.report.live_page import LivePage
from megalaunch.runs.report.page import content_security_policy
from megalaunch.schema import SpecError


class LiveServer(PageServer):
    """The HTTP server of one live page. Without --allow-remote it listens on the loopback interface only.

    Attributes:
        url: the address of the page, with its token.
    """

    needs_token = "the address needs the token that megalaunch watch printed: /?token=..."
    content_security_policy = content_security_policy(live=True)

    def __init__(self, page: LivePage, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen on an IP address; `port` 0 takes a free one. Raises OSError."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        super().__init__(host, port, token)
        self.page = page
        self.url = f"{self.address}?token={token}"

    def read_page(self) -> Page:
        """Return the report as it is now. Raises PageError."""
        try:
            rendering = self.page.read()
        except (SpecError, OSError) as error:
            raise PageError(f"the run cannot be read now: {error}") from error
        return Page(rendering.html, "text/html; charset=utf-8", rendering.tag)
