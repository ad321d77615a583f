"""Settings of a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    Args:
        name: The model's name for clients.
        token: The token of its users; None: none is needed.
        max_num_seqs: Maximum number of texts that are generated at once.
        max_queue: Maximum number of texts that wait; more are refused.
        eager: Launch the kernels of each step one by one.
    """

    name: str
    token: str | None
    max_num_seqs: int = 8
    max_queue: int = 256
    eager: bool = False
