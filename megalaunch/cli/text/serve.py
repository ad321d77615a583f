"""`megalaunch serve`: answer requests over HTTP with a trained model, with OpenAI's interface."""

from __future__ import annotations

import os
import shlex
import socket
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalaunch.cli.listen_address import listen_address
from megalaunch.cli.text.generate import Eager, NoBos, Source
from megalaunch.installation import install_command
from megalaunch.rundir.outcome import ExitCode

if TYPE_CHECKING:
    from megalaunch.engine.api import ModelSource

Host = Annotated[str, typer.Option(metavar="ADDRESS", help="The IP address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0: a free one.")]
AllowRemote = Annotated[
    bool, typer.Option("--allow-remote", help="--host may be an address that other machines reach.")
]
ModelName = Annotated[
    str | None, typer.Option(help="The model's name for clients (default: of the run, or of the folder).")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The file of the token that clients send as API key; made if missing "
        "(default: megalaunch/serve_token in ~/.config).",
    ),
]
NoToken = Annotated[
    bool, typer.Option("--no-token", help="Answer without a token; only on an address of this machine alone.")
]
Sequences = Annotated[int, typer.Option(min=1, help="Maximum number of texts that are generated at once.")]
Queue = Annotated[int, typer.Option(min=0, help="Maximum number of texts that wait; more are refused with 429.")]


def serve(
    source: Source,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    allow_remote: AllowRemote = False,
    model_name: ModelName = None,
    token_file: TokenFile = None,
    no_token: NoToken = False,
    max_num_seqs: Sequences = 8,
    max_queue: Queue = 256,
    no_bos: NoBos = False,
    eager: Eager = False,
) -> None:
    """Serve a model over HTTP with the interface of OpenAI's completions and chat completions, until Ctrl-C.

    Texts of several requests are generated in one batch. The model runs on one device: a GPU if there is one.
    """
    from megalaunch.runs.errors import fail
    from megalaunch.runs.hub_paths import local_model

    address = listen_address(host, allow_remote, "the model")
    path = _token_path(token_file, no_token, address)
    for package in ("torch", "starlette", "uvicorn"):
        if find_spec(package) is None:
            fail(f"serve needs {package}, which is not installed; add it with: {install_command('megalaunch[serve]')}")
    from megalaunch.engine import api

    try:
        opened = api.open_source(local_model(source), lambda message: typer.echo(message, err=True))
        token = None if path is None else _token(path)
        with _listen(address, port) as listener:
            model = api.load_weights(replace(opened, add_special_tokens=False) if no_bos else opened)
            name = model_name or _default_name(opened, source)
            _announce(name, listener, path)
            api.serve(model, listener, api.ServerSettings(name, token, max_num_seqs, max_queue, eager))
    except api.CheckpointError as error:
        fail(str(error), ExitCode.CHECKPOINT)
    except NotADirectoryError as error:
        fail(str(error))
    except KeyboardInterrupt:
        pass
    typer.echo("the server has ended")


def _default_name(opened: ModelSource, source: Path) -> str:
    return opened.spec.run.name or source.absolute().name


def _token_path(token_file: Path | None, no_token: bool, address: str) -> Path | None:
    """Return the file of the clients' token, None without one; end the command for options that exclude each other."""
    from megalaunch.http_access import is_loopback
    from megalaunch.runs.errors import fail

    if not no_token:
        return token_file or Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "megalaunch" / "serve_token"
    if token_file is not None:
        fail("--no-token and --token-file exclude each other: leave one out")
    if not is_loopback(address):
        fail(f"--no-token would let everybody who reaches {address} use the model: leave it out")
    return None


def _token(path: Path) -> str:
    """Return the token in the file, which is made if it is missing; end the command if there is no usable one."""
    from megalaunch.http_access import TokenFileError, keep_token
    from megalaunch.runs.errors import fail

    try:
        return keep_token(path.expanduser())
    except TokenFileError as error:
        fail(f"{error}, or name another file with --token-file")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        reason = error.strerror if isinstance(error, OSError) else error
        fail(f"the token cannot be kept in {path} ({reason}): name another file with --token-file")


def _listen(address: str, port: int) -> socket.socket:
    from megalaunch.runs.errors import fail

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        fail(f"{address} port {port} cannot be listened on ({reason}): give another --port or --host")


def _announce(name: str, listener: socket.socket, token_file: Path | None) -> None:
    from megalaunch.http_access import is_loopback

    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    typer.echo(f"{name} is served at {url}")
    if token_file is not None:
        shown = token_file if str(token_file).startswith("~") else shlex.quote(str(token_file))
        typer.echo(f"clients: OPENAI_BASE_URL={url} OPENAI_API_KEY=$(cat {shown})")
    if is_loopback(host):
        typer.echo(f"from another machine: ssh -L {port}:{host}:{port} THIS_MACHINE, then the same address there")
    typer.echo("Ctrl-C ends the server")
