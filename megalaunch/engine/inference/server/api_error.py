"""Errors of the server, in the form that clients of OpenAI's interface read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ApiError(Exception):
    """A request that is refused.

    Args:
        message: The cause, and what to change.
        param: The field of the request that is wrong, if it is one.
        status: The HTTP status.
        code: A word for programs, such as `context_length_exceeded`.
        headers: Headers of the response.
    """

    message: str
    param: str | None = None
    status: int = 400
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return the JSON of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
