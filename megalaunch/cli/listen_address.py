"""The IP address that a command's HTTP server listens on, from --host and --allow-remote."""

from __future__ import annotations

import ipaddress


def listen_address(host: str, allow_remote: bool, what: str) -> str:
    """Return the IP address to listen on; end the command for one that other machines reach without --allow-remote.

    Args:
        host: The value of --host.
        allow_remote: Whether --allow-remote was given.
        what: What others would reach there, such as `the page`.
    """
    from megalaunch.http_access import is_loopback
    from megalaunch.runs.errors import fail

    address = "127.0.0.1" if host == "localhost" else host
    try:
        ipaddress.ip_address(address)
    except ValueError:
        fail(f"--host {host} is no IP address: give one, such as 127.0.0.1")
    if not is_loopback(address) and not allow_remote:
        fail(
            f"other machines would reach {what} at {host}, over a connection that is not encrypted: leave --host out "
            "and use ssh -L, or add --allow-remote"
        )
    return address
