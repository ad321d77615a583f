"""`megalaunch watch --web`: serve the report of a run as a page that follows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from megalaunch.cli.listen_address import listen_address
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

    address = listen_address(host, allow_remote, "the page")
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
