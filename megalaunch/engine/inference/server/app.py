"""The HTTP application: its paths, and the way of a request to the model's thread and back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from megalaunch.engine.inference.chat_template import ChatTemplate
from megalaunch.engine.inference.continuous_batch import BatchEvent, PromptScore
from megalaunch.engine.inference.load_model import LanguageModel
from megalaunch.engine.inference.sequence_text import Completion, TextDelta
from megalaunch.engine.inference.server.access import OPEN_PATH, AccessCheck
from megalaunch.engine.inference.server.api_error import ApiError
from megalaunch.engine.inference.server.generation_thread import (
    GenerationFailure,
    GenerationThread,
    QueueFullError,
    TooManyTextsError,
)
from megalaunch.engine.inference.server.openai_request import TextRequest, read_chat, read_completion
from megalaunch.engine.inference.server.openai_response import (
    ChatResponse,
    CompletionResponse,
    FinishedText,
)
from megalaunch.engine.inference.server.openai_response import Response as TextResponse
from megalaunch.engine.inference.server.request_fields import refuse_half_characters

_MAX_BODY = 16 << 20  # bytes
_RETRY_SECONDS = 1


@dataclass
class ServedModel:
    """A model and what its requests need.

    Args:
        name: Its name for clients.
        model: The language model.
        thread: The thread that generates its texts.
        template: Its chat template; None: it has none.
    """

    name: str
    model: LanguageModel
    thread: GenerationThread
    template: ChatTemplate | None
    _rendering: threading.Lock = field(default_factory=threading.Lock, init=False)

    def read_chat(self, data: Any) -> TextRequest:
        """Read a request for a chat completion; one at a time, since the template has one process."""
        with self._rendering:
            return read_chat(data, self.model, self.name, self.template)


def make_app(served: ServedModel, token: str | None, only_loopback: bool, created: int) -> Starlette:
    """Return the application.

    Args:
        served: The model; its thread is started and closed with the application.
        token: The token of its users; None: none is needed.
        only_loopback: The server listens on the loopback interface.
        created: When the weights were written, in seconds since 1970.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        served.thread.start()
        try:
            yield
        finally:
            await run_in_threadpool(served.thread.close)
            if served.template is not None:
                served.template.close()

    entry = {"id": served.name, "object": "model", "created": created, "owned_by": "megalaunch"}
    entry["max_model_len"] = served.model.spec.model.max_position_embeddings

    async def completions(request: Request) -> Response:
        asked = read_completion(await _read_json(request), served.model, served.name)
        return await _answer(request, served.thread, CompletionResponse(asked, served.name))

    async def chat_completions(request: Request) -> Response:
        asked = await run_in_threadpool(served.read_chat, await _read_json(request))
        return await _answer(request, served.thread, ChatResponse(asked, served.name))

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [entry]})

    async def model(request: Request) -> Response:
        if request.path_params["name"] != served.name:
            raise ApiError(f"the model is not served; {served.name!r} is", status=404, code="model_not_found")
        return JSONResponse(entry)

    async def health(request: Request) -> Response:
        thread = served.thread
        return JSONResponse({"status": "ok", "running": thread.num_running, "waiting": thread.num_waiting})

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route(OPEN_PATH, health),
        ],
        middleware=[Middleware(AccessCheck, token=token, only_loopback=only_loopback)],
        exception_handlers={ApiError: _refuse, HTTPException: _refuse_path},
        lifespan=lifespan,
    )


async def _read_json(request: Request) -> Any:
    """Return the JSON of a request. Raises ApiError."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError("send JSON, with Content-Type: application/json", status=415)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY:
            raise ApiError(f"the body has more than {_MAX_BODY >> 20} MiB", status=413)
    try:
        data = json.loads(body)
        refuse_half_characters(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {error}") from error
    return data


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, error.headers)


async def _refuse_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    paths = "POST /v1/completions, POST /v1/chat/completions, GET /v1/models, GET /health"
    message = f"{request.method} {request.url.path}: {error.detail.lower()}; there are {paths}"
    return JSONResponse(ApiError(message, status=error.status_code).body(), error.status_code, error.headers)


class _Texts:
    """The texts of one request while they are generated: their events, in the event loop's thread.

    Raises:
        ApiError: The queue is full, or could never hold them.
    """

    def __init__(self, thread: GenerationThread, request: TextRequest) -> None:
        self._thread, self._loop = thread, asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, BatchEvent | GenerationFailure]] = asyncio.Queue()
        self.finished: list[FinishedText | None] = [None] * len(request.texts)
        self._prompt_logprobs = {index: PromptScore(index, ()) for index in range(len(request.texts))}
        try:
            self._numbers = thread.submit(request.texts, self._send)
        except TooManyTextsError as error:
            raise ApiError(str(error)) from error
        except QueueFullError as error:
            raise ApiError(
                f"{error}; try again later", status=429, code="rate_limit_exceeded", headers=_retry_later()
            ) from error

    def _send(self, index: int, event: BatchEvent | GenerationFailure) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended: the server stops
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def events(self) -> AsyncIterator[tuple[int, TextDelta | FinishedText]]:
        """Yield new text and finished texts, until all have ended. Raises ApiError: they could not be generated."""
        try:
            while not all(self.finished):
                index, event = await self._events.get()
                if isinstance(event, GenerationFailure):
                    raise ApiError(f"the text could not be generated: {event.reason}", status=500)
                if isinstance(event, PromptScore):
                    self._prompt_logprobs[index] = event
                elif isinstance(event, Completion):
                    done = self.finished[index] = FinishedText(event, self._prompt_logprobs[index].logprobs)
                    yield index, done
                else:
                    yield index, event
        finally:
            self._thread.cancel([number for number, one in zip(self._numbers, self.finished, strict=True) if not one])

    @property
    def results(self) -> Sequence[FinishedText]:
        """The finished texts."""
        return [text for text in self.finished if text is not None]


def _retry_later() -> dict[str, str]:
    return {"Retry-After": str(_RETRY_SECONDS)}


async def _answer(request: Request, thread: GenerationThread, response: TextResponse) -> Response:
    """Generate the texts of a request, and return them whole, or as a stream of server-sent events."""
    texts = _Texts(thread, response.request)
    if response.request.stream:
        return StreamingResponse(_stream(texts, response), media_type="text/event-stream")
    collecting = asyncio.ensure_future(_collect(texts))
    watching = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({collecting, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=499)  # nobody reads it
        await collecting
    finally:
        for task in (collecting, watching):
            task.cancel()
    return JSONResponse(response.whole(texts.results))


async def _collect(texts: _Texts) -> None:
    async for _ in texts.events():
        pass


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(texts: _Texts, response: TextResponse) -> AsyncIterator[str]:
    for chunk in response.first_chunks():
        yield _event(chunk)
    try:
        async for index, event in texts.events():
            if isinstance(event, FinishedText):
                yield _event(response.last_chunk(index, event))
            else:
                yield _event(response.delta_chunk(index, event.text))
    except ApiError as error:  # the status was sent before
        yield _event(error.body())
        return
    if response.request.include_usage:
        yield _event(response.usage_chunk(texts.results))
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
