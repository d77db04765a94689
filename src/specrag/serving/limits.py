"""How long and how slow the body of a request may be, whether or not it says its length beforehand."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
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
    """Ends requests whose body is too large (413) or arrives too slowly (408), and too many uploads of a key (429).

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
        self._arriving: Counter[str] = Counter()  # uploads by key

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
    """A ``receive`` that counts.

    Args:
        receive: the server's.
        most: bytes.
        seconds: until the last of them.
        settings: what a slow body is; only the time in which the client is waited for counts.
        clock: seconds; by default the event loop's.
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
        """The next part of the body; behind its end the news that the client has gone, whenever that is."""
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
