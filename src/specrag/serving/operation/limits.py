"""Limits the size, the slowness and the number of values of request bodies, with or without a declared length.

JSON is parsed in the event loop, and the cost grows with the number of values. A body of 4 MiB can hold one text or
1.4 million empty objects. The text is parsed in 10 ms; the objects, checked one by one, held up every other request
for seconds.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specrag.serving.errors import ApiError, error_response
from specrag.serving.settings import Settings

#: Most values in one body, and most objects and lists among them, which cost the most to parse and check.
MAX_VALUES, MAX_NESTED = 150_000, 10_000

_OPENING = (b"[", b"{")
# One of these precedes every value but the first; inside a string they do not count.
_MARKS = (*_OPENING, b":", b",")
_TEXT_OR_MARK = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[{:,]', re.DOTALL)


class JsonRoute(APIRoute):
    """A route that refuses a JSON body with too many values, before parsing it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_BoundedRequest(request.scope, request.receive))

        return handle


class _BoundedRequest(Request):
    async def json(self) -> Any:
        """Parse the body.

        Raises:
            ApiError: it holds too many values.
        """
        if _holds_more(await self.body(), MAX_VALUES, MAX_NESTED):
            message = (
                f"the body holds more than {MAX_VALUES:,} values; send fewer messages, prompts or tokens"
            )
            raise ApiError(400, message, code="invalid_value")
        # Counting, parsing and checking each take a turn of the event loop of their own.
        await asyncio.sleep(0)
        content = await super().json()
        await asyncio.sleep(0)
        return content


def _holds_more(body: bytes, most: int, most_nested: int) -> bool:
    counted = {mark: body.count(mark) for mark in _MARKS}
    if sum(counted.values()) <= most and counted[b"["] + counted[b"{"] <= most_nested:
        return False
    marks = nested = texts = 0
    for found in _TEXT_OR_MARK.finditer(body):
        if found[0][:1] == b'"':
            texts += 1
        else:
            marks += 1
            nested += found[0] in _OPENING
        # In well-formed JSON there is a mark between any two strings.
        if marks > most or nested > most_nested or texts > most + 1:
            return True
    return False


#: The route of uploads, which have limits of their own.
UPLOAD = re.compile(r"/v1/kb/[^/]+/documents/?")

_OVERHEAD = 64 * 2**10  # bytes of a multipart body beside its files
_DIGITS = 18


class BodyLimits:
    """Ends requests whose body is too large (413) or arrives too slowly (408), and too many uploads of a key (429).

    Bytes are counted as they are read, so a chunked body without a length is cut as soon as it exceeds the limit.

    Args:
        app: the wrapped application.
        settings: the limits.
        clock: in seconds; by default the event loop's.
    """

    def __init__(self, app: ASGIApp, settings: Settings, clock: Callable[[], float] | None = None) -> None:
        self._app = app
        self._settings = settings
        self._clock = clock
        self._arriving: Counter[str] = Counter()  # uploads in progress, by key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        upload = scope["method"] == "POST" and UPLOAD.fullmatch(scope["path"]) is not None
        if upload:
            most = self._settings.max_upload_bytes + _OVERHEAD * (1 + self._settings.max_upload_files // 16)
            seconds = self._settings.upload_seconds
        else:
            most, seconds = self._settings.max_body_bytes, self._settings.body_seconds
        headers = Headers(scope=scope)
        said = headers.get("content-length", "")
        if said and "transfer-encoding" in headers:
            await error_response(_two_lengths())(scope, receive, send)
            return
        if said and (not said.isdigit() or len(said) > _DIGITS or int(said) > most):
            await error_response(_too_large(most))(scope, receive, send)
            return
        reading = _Reading(receive, most, seconds, self._settings, self._clock)
        if not upload:
            await self._app(scope, reading, send)
            return
        key = scope["state"]["key"].name
        if self._arriving[key] >= self._settings.max_uploads:
            await error_response(_too_many(self._settings.max_uploads))(scope, receive, send)
            return
        self._arriving[key] += 1
        try:
            await self._app(scope, reading, send)
        finally:
            self._arriving[key] -= 1


class _Reading:
    """A ``receive`` that counts bytes and time.

    Args:
        receive: the server's.
        most: bytes of the body.
        seconds: until the whole body has arrived.
        settings: define a slow body; only the time spent waiting for the client counts.
        clock: in seconds; by default the event loop's.
    """

    def __init__(
        self,
        receive: Receive,
        most: int,
        seconds: float,
        settings: Settings,
        clock: Callable[[], float] | None,
    ) -> None:
        self._receive = receive
        self._most = most
        self._seconds = seconds
        self._clock = clock or asyncio.get_running_loop().time
        self._started = self._clock()
        self._grace, self._rate = settings.body_seconds, settings.min_body_rate
        self._waited = 0.0
        self._read = 0
        self._ended = False

    async def __call__(self) -> Message:
        """The next part of the body; after its end, the message that the client has gone, whenever that comes."""
        if self._ended:
            return await self._receive()
        began = self._clock()
        left = self._started + self._seconds - began
        patience = self._grace + self._read / self._rate - self._waited
        try:
            async with asyncio.timeout(max(min(left, patience), 0.001)):
                message = await self._receive()
        except TimeoutError:
            self._ended = True
            if patience < left:
                slow = f"the body arrived at less than {self._rate:,} bytes a second"
                raise ApiError(408, slow) from None
            raise ApiError(408, f"the body did not arrive within {self._seconds:g} seconds") from None
        self._waited += self._clock() - began
        self._read += len(message.get("body", b""))
        self._ended = message["type"] != "http.request" or not message.get("more_body", False)
        if self._read > self._most:
            self._ended = True
            raise _too_large(self._most)
        return message


def _two_lengths() -> ApiError:
    return ApiError(400, "the request has two lengths; send Content-Length or Transfer-Encoding, not both")


def _too_many(most: int) -> ApiError:
    message = f"{most} uploads of this key arrive already; send one after the other"
    return ApiError(429, message, code="uploads_full", headers={"Retry-After": "10"})


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most:,} bytes")
