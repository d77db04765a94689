"""Sends answers as server-sent events or as large JSON, and ends work whose client goes away."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing
from copy import copy
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specrag.errors import Cancelled
from specrag.serving.errors import error_body, error_response, to_api_error

T = TypeVar("T")

_DONE = b"data: [DONE]\n\n"

#: Keep proxies from holding back parts of an answer.
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

_log = logging.getLogger("specrag.serving")


class EventStream(Response):
    """An answer that is streamed as server-sent events, one chunk per event.

    A failure before the first chunk is answered with its own status; a later one with an event that holds the error.
    When the client goes away, the chunks are closed, which ends the work that makes them.

    Args:
        chunks: JSON objects.
        ended: called at the end, whether it succeeded or not.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[Mapping[str, Any]], ended: Callable[[], object]) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._chunks = chunks
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            await until_gone(receive, self._send_all(scope, receive, send))
        except Cancelled:
            pass  # no client is left to tell
        finally:
            self._ended()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:  # type: ignore[type-var]
            try:
                first = await anext(chunks, None)
            except Exception as error:
                _note(error)
                await error_response(to_api_error(error))(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                if first is not None:
                    await _send(send, _event(first))
                async for chunk in chunks:
                    await _send(send, _event(chunk))
            except Exception as error:
                _note(error)
                told = to_api_error(error)
                body = error_body(told.status_code, str(told.detail), code=told.code, param=told.param)
                await _send(send, _event(body))
            await _send(send, _DONE)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do some work; end it if the client closes the connection.

    Args:
        receive: of a request whose body has been read.

    Raises:
        Cancelled: the connection was closed first.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("the client has gone")
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


def _event(chunk: Mapping[str, Any]) -> bytes:
    kind = chunk.get("type")  # events of /v1/responses have one
    named = f"event: {kind}\n" if kind else ""
    return f"{named}data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()


def _note(error: Exception) -> None:
    """Log an unexpected failure: the client is only told that there was one."""
    if to_api_error(error).status_code == 500:
        _log.error("a request failed", exc_info=error)


# -- large answers ----------------------------------------------------------------------------------------------

_DEPTH = 5  # levels from a whole answer to one token, which is written at once with its alternatives


def to_json(value: Any) -> bytes:
    """Encode a value as the standard encoder does without spaces, and empty it; must not be called in the event loop.

    The standard encoder writes a whole value in one call, during which no other thread runs, not even that of the
    event loop. Here a value is written piece by piece, so that other threads run in between. Nor are the pieces
    joined or the value given back in the end: memory for all at once took half a second of a virtual machine's time.
    """
    written, held = io.BytesIO(), copy(value)
    if isinstance(value, dict | list):
        value.clear()
    pieces = _pieces(held, _DEPTH)
    del held
    for piece in pieces:
        written.write(piece.encode())
    return written.getvalue()  # its own memory, not a copy


def _pieces(value: Any, depth: int) -> Iterator[str]:
    if depth and isinstance(value, dict):
        yield "{"
        keys, inner = list(value), list(value.values())[::-1]
        del value  # what has been written is dropped; it may stand elsewhere too, so that it is not emptied
        for number, key in enumerate(keys):
            yield f"{',' if number else ''}{_written(key)}:"
            yield from _pieces(inner.pop(), depth - 1)
        yield "}"
    elif depth and isinstance(value, list):
        yield "["
        inner = value[::-1]
        del value
        for number in range(len(inner)):
            if number:
                yield ","
            yield from _pieces(inner.pop(), depth - 1)
        yield "]"
    else:
        yield _written(value)


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
