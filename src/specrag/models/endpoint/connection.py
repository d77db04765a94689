"""Calls to an OpenAI-compatible endpoint: bounded concurrency, a total timeout, retries, cancellation.

The official client runs in an event loop in its own thread; callers wait in a
:class:`~specrag.engine.passes.Search`. One timeout covers the whole call, including retries and a slowly dripping
answer.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from specrag.checks import check_number, check_whole
from specrag.errors import ContextLengthError, EndpointUnavailable, InputError, SpecragError
from specrag.models.endpoint.loop import LoopThread

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAIError

#: Environment variable that holds the key, unless the settings name another.
KEY_VARIABLE = "SPECRAG_API_KEY"

_NO_KEY = "none"  # local servers need no key, but the client insists on one
_TOLD = 200  # the most characters of a server's own message that are shown


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Timeouts, retries and identity of an endpoint's client.

    Args:
        timeout: seconds for a whole call, including retries; waiting for a free slot is not counted.
        connect_timeout: seconds for connecting.
        retries: further attempts, with growing pauses, if a connection failed or the server is overloaded or broken.
        concurrency: the most calls under way at once; more wait for their turn.
        key_variable: environment variable that holds the API key. The key is sent to the endpoint and never shown.
        tokenizer: a local model (catalog name or folder) with the endpoint's tokenizer and chat template. With it,
            prompts are templated and tokenised here and sent as token ids, so that borders between parts are exact;
            without it, the server does both.
        context_length: tokens of the model's context, if the endpoint does not tell.

    Raises:
        InputError: a value cannot be used.
    """

    timeout: float = 120.0
    connect_timeout: float = 5.0
    retries: int = 2
    concurrency: int = 8
    key_variable: str = KEY_VARIABLE
    tokenizer: str | None = None
    context_length: int | None = None

    def __post_init__(self) -> None:
        for name in ("timeout", "connect_timeout"):
            check_number(name, getattr(self, name), above=0, remedy="give a number of seconds above 0")
        check_whole("retries", self.retries, 0)
        check_whole("concurrency", self.concurrency)
        if self.context_length is not None:
            check_whole("context_length", self.context_length)
        if not self.key_variable:
            raise InputError("key_variable", self.key_variable, "give the name of an environment variable")


@dataclass(frozen=True, slots=True)
class Call:
    """A call to the endpoint.

    Args:
        path: such as ``/completions``.
        body: the JSON object to send (POST); ``None`` for a GET.
    """

    path: str
    body: Mapping[str, object] | None = None


class Refused(EndpointUnavailable):
    """The endpoint understood a call but does not serve it (400, 404, 405, 422)."""


@dataclass(frozen=True, slots=True)
class FinishedCall:
    """A call that has ended, successfully or not.

    Attributes:
        number: number of the call, in the order given.
    """

    number: int
    future: Future[Any]

    def answer(self) -> Any:
        """The endpoint's JSON answer.

        Raises:
            EndpointUnavailable: there was none.
            Refused: the endpoint does not serve this kind of call.
            ContextLengthError: the prompt is longer than the model's context.
        """
        try:
            return self.future.result()
        except CancelledError:
            raise EndpointUnavailable("the endpoint was closed while a call was under way") from None


class Calls:
    """Calls under way, returned in the order in which they end."""

    def __init__(self, futures: Sequence[Future[Any]]) -> None:
        self._futures: list[Future[Any]] = []
        self._ended: SimpleQueue[FinishedCall] = SimpleQueue()
        for number, future in enumerate(futures):
            self.add(number, future)

    def add(self, number: int, future: Future[Any]) -> None:
        """Add another call to the group."""
        self._futures.append(future)
        future.add_done_callback(lambda done: self._ended.put(FinishedCall(number, done)))

    def next(self) -> FinishedCall:
        """Wait for the next call to end; to be called once per call. :meth:`cancel` ends the waiting."""
        return self._ended.get()

    def cancel(self) -> None:
        """End what is under way."""
        for future in self._futures:
            future.cancel()


class Connection:
    """An endpoint's address and its client, which is made at the first call. Safe from any thread.

    Args:
        url: the address, up to and including ``/v1``.
        settings: how to talk to it.
    """

    def __init__(self, url: str, settings: EndpointSettings) -> None:
        self.url = url
        self.settings = settings
        self._lock = threading.Lock()
        self._loop = LoopThread("specrag-endpoint")
        self._client: AsyncOpenAI | None = None
        self._slots = asyncio.Semaphore(settings.concurrency)

    def begin(self, calls: Sequence[Call]) -> Calls:
        """Start calls."""
        return Calls([self.start(call) for call in calls])

    def start(self, call: Call) -> Future[Any]:
        """Start one call."""
        with self._lock:
            if self._client is None:
                self._client = self._make_client()
                self._slots = asyncio.Semaphore(self.settings.concurrency)  # belongs to one event loop
            return self._loop.start(self._make(call, self._client))

    def ask(self, call: Call) -> Any:
        """Make one call and wait for its JSON answer; raises what :meth:`FinishedCall.answer` does."""
        return self.begin([call]).next().answer()

    def close(self) -> None:
        """End everything under way and close the connections."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            self._loop.close(client.close)

    def _make_client(self) -> AsyncOpenAI:
        from openai import AsyncOpenAI, Timeout

        settings = self.settings
        return AsyncOpenAI(
            base_url=self.url,
            api_key=self._key() or _NO_KEY,
            max_retries=settings.retries,
            timeout=Timeout(settings.timeout, connect=settings.connect_timeout),
        )

    def _key(self) -> str:
        return os.environ.get(self.settings.key_variable, "").strip()

    async def _make(self, call: Call, client: AsyncOpenAI) -> Any:
        from openai import OpenAIError

        try:
            async with self._slots, asyncio.timeout(self.settings.timeout):
                if call.body is None:
                    return await client.get(call.path, cast_to=object)
                return await client.post(call.path, body=dict(call.body), cast_to=object)
        except TimeoutError:
            raise self._too_slow() from None
        except OpenAIError as error:
            raise self._translated(error) from None
        except ValueError:
            raise EndpointUnavailable(f"endpoint {self.url}: its answer to {call.path} is no JSON") from None

    def _too_slow(self) -> EndpointUnavailable:
        return EndpointUnavailable(
            f"endpoint {self.url}: no answer within {self.settings.timeout:g} s; give it more time or a smaller task"
        )

    def _translated(self, error: OpenAIError) -> SpecragError:
        """The client's error as one of ours."""
        import openai

        said = self._without_key(" ".join(str(error).split()))[:_TOLD]
        if isinstance(error, openai.APITimeoutError):
            return self._too_slow()
        if isinstance(error, openai.APIConnectionError):
            reason = self._without_key(str(error.__cause__ or error) or type(error.__cause__).__name__)
            return EndpointUnavailable(
                f"endpoint {self.url}: cannot be reached ({' '.join(reason.split())[:_TOLD]}); is the server running?"
            )
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            return EndpointUnavailable(
                f"endpoint {self.url}: it refuses the key; set {self.settings.key_variable} to a valid one"
            )
        if isinstance(error, openai.RateLimitError):
            return EndpointUnavailable(f"endpoint {self.url}: it is overloaded; try later ({said})")
        if isinstance(error, openai.APIStatusError) and error.status_code in (400, 404, 405, 422):
            if "context length" in said.lower() or "context_length" in said.lower():
                return ContextLengthError("prompt", "(sent to an endpoint)", f"the endpoint says: {said}")
            return Refused(f"endpoint {self.url}: it refuses the request: {said}")
        return EndpointUnavailable(f"endpoint {self.url}: it failed: {said}")

    def _without_key(self, text: str) -> str:
        key = self._key()
        return text.replace(key, "***") if key else text
