"""Serve a model over HTTP until a signal ends it."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator

import uvicorn

from megalaunch.engine.inference.chat_template import find_chat_template
from megalaunch.engine.inference.load_model import LanguageModel
from megalaunch.engine.inference.server.app import ServedModel, make_app
from megalaunch.engine.inference.server.generation_thread import GenerationThread
from megalaunch.engine.inference.server.settings import ServerSettings
from megalaunch.http_access import is_loopback

_GRACE_SECONDS = 5  # for texts that are generated when the server is told to end


def serve(model: LanguageModel, listener: socket.socket, settings: ServerSettings) -> None:
    """Serve a model on a listening socket until SIGINT or SIGTERM. Call it in the main thread.

    Raises:
        CheckpointError: The files of the chat template cannot be read.
    """
    template = find_chat_template(model.files)
    thread = GenerationThread(model, settings.max_num_seqs, settings.max_queue, settings.eager)
    served = ServedModel(settings.name, model, thread, template)
    only_loopback = is_loopback(listener.getsockname()[0])
    created = int(model.checkpoint.stat().st_mtime)
    config = uvicorn.Config(
        make_app(served, settings.token, only_loopback, created),
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    with contextlib.suppress(KeyboardInterrupt), _ignored_at_the_end(signal.SIGTERM):
        uvicorn.Server(config).run(sockets=[listener])


@contextlib.contextmanager
def _ignored_at_the_end(number: signal.Signals) -> Iterator[None]:
    """uvicorn raises the signal that ended it once more, which would end this process as if it had failed."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)
