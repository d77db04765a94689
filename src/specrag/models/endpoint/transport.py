"""HTTP to one replica of a pool: JSON answers and server-sent events, with failures classified by their remedy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx2

    from specrag.models.endpoint.connection import Call

#: Largest JSON answer, and largest event of a stream, in bytes.
MAX_ANSWER, MAX_EVENT = 64 * 2**20, 2**20

#: The most characters of a replica's own error message that are passed on.
_TOLD = 300

#: Longest pause that a replica may ask for, in seconds.
_LONGEST_PAUSE = 3600.0


class Fault(Enum):
    """Why a call has failed, by what is to be done about it."""

    #: Nothing answers at its address: taken out at once, another replica is tried.
    UNREACHABLE = auto()
    #: The connection ended in mid-answer, perhaps because it was an old one: the replica is tried once more.
    DROPPED = auto()
    #: It answers 5xx, too late, or unusably: another replica is tried.
    BROKEN = auto()
    #: It refuses the key or does not serve the model: taken out at once, another replica is tried.
    MISFIT = auto()
    #: It is healthy but asks for a pause: another replica is tried.
    BUSY = auto()
    #: It understood and refused the request: no replica would accept it.
    REFUSED = auto()


class CallError(Exception):
    """A call to one replica has failed.

    Args:
        fault: the kind of failure.
        reason: a sentence fragment that reveals neither address nor key.
        status: HTTP status for the client.
        pause: seconds of pause that a busy replica asks for.
    """

    def __init__(self, fault: Fault, reason: str, *, status: int = 502, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.fault = fault
        self.reason = reason
        self.status = status
        self.pause = pause


@dataclass(frozen=True, slots=True)
class Address:
    """Where a replica is.

    Args:
        url: the address, up to and including ``/v1``.
        key: API key, sent to this replica only; empty for none.
        socket: a Unix socket to connect to instead of the host in the address; empty for none.
        connect_seconds: time limit for connecting.
        silence_seconds: seconds without a byte after which a stream has failed.
        answer_seconds: the same for an answer in one piece, whose first byte comes only when all of it is written.
    """

    url: str
    key: str = field(default="", repr=False)
    socket: str = ""
    connect_seconds: float = 5.0
    silence_seconds: float = 60.0
    answer_seconds: float = 600.0


class Transport:
    """The HTTP client of one replica; for the coroutines of one event loop.

    Args:
        address: where it is.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._client: httpx2.AsyncClient | None = None

    async def ask(self, call: Call, seconds: float | None = None) -> Any:
        """The JSON answer to a call.

        Args:
            seconds: seconds without a byte after which the call has failed; by default those of the address.

        Raises:
            CallError: there is none.
        """
        async with self._response(call, seconds or self._address.answer_seconds) as response:
            return await _json_of(response)

    async def events(self, call: Call) -> AsyncGenerator[Mapping[str, Any], None]:
        """The objects of a streamed answer, up to its ``[DONE]``.

        Raises:
            CallError: there is no such stream, or it breaks off.
        """
        async with self._response(call, self._address.silence_seconds) as response:
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise CallError(Fault.BROKEN, "it answers without a stream of events")
            async with aclosing(_data_of(response)) as lines:
                async for data in lines:
                    if data == b"[DONE]":
                        return
                    yield self._event(data)
        raise CallError(Fault.DROPPED, "its answer breaks off")

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()

    def _event(self, data: bytes) -> Mapping[str, Any]:
        try:
            event = json.loads(data)
        except ValueError:
            raise CallError(Fault.BROKEN, "its stream holds what is no JSON") from None
        if not isinstance(event, Mapping):
            raise CallError(Fault.BROKEN, "its stream holds what is no JSON object")
        if event.get("error"):
            raise CallError(Fault.BROKEN, f"it failed: {self._shown(_message(event))}")
        return event

    @asynccontextmanager
    async def _response(self, call: Call, seconds: float) -> AsyncIterator[httpx2.Response]:
        """The response with status 200; HTTP errors inside the block are raised as :class:`CallError`."""
        import httpx2

        address = self._address
        method, url = ("GET" if call.body is None else "POST"), f"{address.url}{call.path}"
        timeout = httpx2.Timeout(seconds, connect=address.connect_seconds, pool=None)
        try:
            async with self._opened().stream(method, url, json=call.body, timeout=timeout) as response:
                if response.status_code != 200:
                    raise await self._refusal(response)
                yield response
        except (httpx2.ConnectError, httpx2.ConnectTimeout):
            raise CallError(Fault.UNREACHABLE, "it cannot be reached", status=503) from None
        except httpx2.TimeoutException:
            reason = f"nothing came for {seconds:g} s"
            raise CallError(Fault.BROKEN, reason, status=504) from None
        except httpx2.HTTPError:
            raise CallError(Fault.DROPPED, "the connection broke off") from None

    def _opened(self) -> httpx2.AsyncClient:
        import httpx2

        if self._client is None:
            address = self._address
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=4.0)
            self._client = httpx2.AsyncClient(
                headers={"Authorization": f"Bearer {address.key}"} if address.key else {},
                transport=httpx2.AsyncHTTPTransport(
                    trust_env=False, limits=limits, uds=address.socket or None
                ),
                follow_redirects=False,
                trust_env=False,  # proxies and passwords of the environment are not meant for upstreams
            )
        return self._client

    async def _refusal(self, response: httpx2.Response) -> CallError:
        """The error for an answer with a status other than 200."""
        status = response.status_code
        body = await _error_of(response)
        said = self._shown(_message(body))
        pause = _pause(response.headers.get("retry-after"))
        if status == 429 or (status == 503 and pause is not None):
            reason = "it is too busy; ask again later"
            return CallError(Fault.BUSY, reason, status=status, pause=1.0 if pause is None else pause)
        if status in (401, 403):
            return CallError(Fault.MISFIT, "it refuses the gateway's key")
        if status == 404 and body.get("code") == "model_not_found":
            return CallError(Fault.MISFIT, "it does not serve the model")
        if status in (400, 404, 405, 413, 422):
            return CallError(Fault.REFUSED, f"it refuses the request: {said}", status=400)
        return CallError(Fault.BROKEN, f"it answers {status}")

    def _shown(self, text: str) -> str:
        """A replica's message without address and key."""
        shown = text.replace(self._address.url, "(address)")
        shown = shown.replace(self._address.key, "***") if self._address.key else shown
        return " ".join(shown.split())[:_TOLD] or "it does not say why"


async def _json_of(response: httpx2.Response) -> Any:
    whole = bytearray()
    async for piece in response.aiter_bytes():
        whole += piece
        if len(whole) > MAX_ANSWER:
            raise CallError(Fault.BROKEN, f"its answer is longer than {MAX_ANSWER:,} bytes")
    try:
        return await asyncio.to_thread(json.loads, whole) if len(whole) > MAX_EVENT else json.loads(whole)
    except ValueError:
        raise CallError(Fault.BROKEN, "its answer is no JSON") from None


async def _error_of(response: httpx2.Response) -> Mapping[str, Any]:
    """The object ``error`` of a refusal, or an empty one."""
    try:
        answer = await _json_of(response)
    except CallError:
        return {}
    error = answer.get("error", answer) if isinstance(answer, Mapping) else None
    return error if isinstance(error, Mapping) else {}


def _message(body: Mapping[str, Any]) -> str:
    error = body.get("error", body)
    said = error.get("message") if isinstance(error, Mapping) else error
    return said if isinstance(said, str) else ""


async def _data_of(response: httpx2.Response) -> AsyncGenerator[bytes, None]:
    """What follows ``data:`` in each line of a stream."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
        if len(rest) > MAX_EVENT:
            raise CallError(Fault.BROKEN, f"its stream holds an event of more than {MAX_EVENT:,} bytes")


def _pause(header: str | None) -> float | None:
    """The seconds in a ``Retry-After`` header; ``None`` if it holds none."""
    try:
        return min(max(float(header or ""), 0.0), _LONGEST_PAUSE)
    except ValueError:
        return None
