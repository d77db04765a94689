"""JSON bodies that are read in the event loop, bounded before they are: what they cost grows with their values.

A body of 4 MiB can hold a text or 1.4 million empty objects. The text is read in 10 ms; the objects, checked one by
one, held every other request up for seconds.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from specrag.serving.problems import ApiError

#: Most values of one body, and most of them that are objects or lists, which cost most to read and to check.
MAX_VALUES, MAX_NESTED = 150_000, 10_000

_OPENING = (b"[", b"{")
# One of these stands in front of every value but the first; inside a text they are none.
_MARKS = (*_OPENING, b":", b",")
_TEXT_OR_MARK = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[{:,]', re.DOTALL)


class JsonRoute(APIRoute):
    """A route whose JSON body is refused, before it is read, if it holds too many values."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_BoundedRequest(request.scope, request.receive))

        return handle


class _BoundedRequest(Request):
    async def json(self) -> Any:
        """The body as Python's values.

        Raises:
            ApiError: it holds too many of them.
        """
        if _holds_more(await self.body(), MAX_VALUES, MAX_NESTED):
            message = (
                f"the body holds more than {MAX_VALUES:,} values; send fewer messages, prompts or tokens"
            )
            raise ApiError(400, message, code="invalid_value")
        # Counting, reading and checking take a turn of the event loop each.
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
        # Between two texts of well-formed JSON stands a mark.
        if marks > most or nested > most_nested or texts > most + 1:
            return True
    return False
