"""`megalaunch watch --web`: serve the report of a run as a page that follows it."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

import typer

from megalaunch.installation import install_command

if TYPE_CHECKING:
    from megalaunch.rundir.paths import RunDirectory


def serve_page(directory: RunDirectory, host: str, port: int, allow_remote: bool) -> None:
    """Serve the page until Ctrl-C; print its address first."""
    from megalaunch.launch.directory import run_is_locked
    from megalaunch.runs.errors import fail
    from megalaunch.runs.report.live_page import LivePage
    from megalaunch.runs.report.live_server import LiveServer
    from megalaunch.schema import SpecError

    address = _listen_address(host, allow_remote)
    page = LivePage(directory)
    try:
        page.read()
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        fail(f"{package} is not installed, and draws the page: {install_command('megalaunch[train]')}")
    except (SpecError, OSError) as error:
        fail(str(error))
    try:
        server = LiveServer(page, address, port)
    except OSError as error:
        fail(f"{address} port {port} cannot be listened on ({error.strerror}): give another --port or --host")
    typer.echo(server.url)
    if server.only_loopback:
        shown = server.server_port
        typer.echo(f"from another machine: ssh -L {shown}:{address}:{shown} THIS_MACHINE, then the same address there")
    typer.echo("Ctrl-C ends the page")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        typer.echo("the run continues" if run_is_locked(directory) else "the page has ended")
    finally:
        server.server_close()


def _listen_address(host: str, allow_remote: bool) -> str:
    """Return the IP address to listen on, or end the command."""
    from megalaunch.launch.page_server import is_loopback
    from megalaunch.runs.errors import fail

    address = "127.0.0.1" if host == "localhost" else host
    try:
        ipaddress.ip_address(address)
    except ValueError:
        fail(f"--host {host} is no IP address: give one, such as 127.0.0.1")
    if not is_loopback(address) and not allow_remote:
        fail(
            f"other machines would reach the page at {host}, over a connection that is not encrypted: leave --host out "
            "and use ssh -L, or add --allow-remote"
        )
    return address
