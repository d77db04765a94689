"""How long and how slow the body of a request may be, whether or not it says its length beforehand."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specrag.serving.problems import ApiError, error_response
from specrag.serving.settings import Settings

#: Where files are uploaded; their limits are others.
UPLOAD = re.compile(r"/v1/kb/[^/]+/documents/?")

_OVERHEAD = 64 * 2**10  # of a multipart body's own lines
_DIGITS = 18


class BodyLimits:
    """Ends requests whose body is too large (413) or takes too long to arrive (408).

    A body is counted as it is read, so that one sent in chunks, without a length, is cut where it exceeds.

    Args:
        app: what answers.
        settings: the limits.
        clock: seconds.
    """

    def __init__(self, app: ASGIApp, settings: Settings, clock: Callable[[], float] | None = None) -> None:
        self._app = app
        self._settings = settings
        self._clock = clock

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
        said = Headers(scope=scope).get("content-length", "")
        if said and (not said.isdigit() or len(said) > _DIGITS or int(said) > most):
            await error_response(_too_large(most))(scope, receive, send)
            return
        await self._app(scope, _Reading(receive, most, seconds, self._clock), send)


class _Reading:
    """A ``receive`` that counts.

    Args:
        receive: the server's.
        most: bytes.
        seconds: until the last of them.
        clock: seconds; by default the event loop's.
    """

    def __init__(
        self, receive: Receive, most: int, seconds: float, clock: Callable[[], float] | None
    ) -> None:
        self._receive = receive
        self._most = most
        self._seconds = seconds
        self._clock = clock or asyncio.get_running_loop().time
        self._started = self._clock()
        self._read = 0
        self._ended = False

    async def __call__(self) -> Message:
        """The next part of the body; behind its end the news that the client has gone, whenever that is."""
        if self._ended:
            return await self._receive()
        left = self._started + self._seconds - self._clock()
        try:
            async with asyncio.timeout(max(left, 0.001)):
                message = await self._receive()
        except TimeoutError:
            self._ended = True
            raise ApiError(408, f"the body did not arrive within {self._seconds:g} seconds") from None
        self._read += len(message.get("body", b""))
        self._ended = message["type"] != "http.request" or not message.get("more_body", False)
        if self._read > self._most:
            self._ended = True
            raise _too_large(self._most)
        return message


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most:,} bytes")
