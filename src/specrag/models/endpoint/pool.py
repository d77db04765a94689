"""Replicas of one model behind one name: which one is called, what is retried elsewhere, which ones are left out.

A pool takes the place of a :class:`~specrag.models.endpoint.connection.Connection`, so that an
:class:`~specrag.models.endpoint.client.Endpoint` works with many replicas as with one address.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from specrag.errors import ContextLengthError, SpecragError, UpstreamError
from specrag.models.endpoint.breaker import Breaker
from specrag.models.endpoint.chunks import Chunk, read_chunk
from specrag.models.endpoint.connection import Call, Calls, Refused
from specrag.models.endpoint.loop import LoopThread
from specrag.models.endpoint.prefixes import BLOCK_TOKENS, Blocks, ReadPrefixes, blocks_of, prompt_bytes
from specrag.models.endpoint.transport import Address, CallError, Fault, Transport

T = TypeVar("T")

#: Estimated bytes of a prompt per token, and tokens of an answer without a length limit.
_BYTES_A_TOKEN, _USUAL_ANSWER = 4, 256

#: Seconds that a probe may take, and seconds between two checks for replicas to probe.
_PROBE_SECONDS, _LOOK_SECONDS = 5.0, 0.2


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Settings of one replica.

    Args:
        address: where it is, with its key.
        weight: its share of the work, relative to the weights of the others.
        model: its name for the model; ``None`` for the pool's name, or the first model that it lists.
        own_name: whether ``model`` is the name on this replica only, and says nothing about the other replicas.
    """

    address: Address
    weight: float = 1.0
    model: str | None = None
    own_name: bool = False


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How a pool judges its replicas.

    Args:
        failures: failed calls in a row after which a replica is left out.
        rest_seconds: seconds before it is probed; doubled with each failed probe.
        check_seconds: seconds between probes of a replica that is in use.
    """

    failures: int = 3
    rest_seconds: float = 1.0
    check_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class Load:
    """The work that a call means for a replica.

    Attributes:
        tokens: estimated tokens of prompt and answer.
        blocks: the blocks with which the prompt begins.
    """

    tokens: int
    blocks: Blocks

    @classmethod
    def of(cls, call: Call) -> Load:
        """The load of a call."""
        if call.body is None:
            return cls(0, ())
        prompt = prompt_bytes(call.body)
        limits = (call.body.get("max_completion_tokens"), call.body.get("max_tokens"), _USUAL_ANSWER)
        most = next(limit for limit in limits if limit is not None)
        choices = call.body.get("n") or 1
        written = most * choices if isinstance(most, int) and isinstance(choices, int) else _USUAL_ANSWER
        return cls(len(prompt) // _BYTES_A_TOKEN + written, blocks_of(prompt))


class Replica:
    """One replica of a pool, with what the pool knows about it.

    Args:
        number: its number in the pool, from 1.
        settings: where it is.
        pool: how it is judged.
        clock: returns seconds.

    Attributes:
        outstanding: tokens of the calls under way.
        asked: number of the pool's call that it was last chosen for.
        calls, failed: counts of calls.
        model: its name for the model; ``None`` until it has been asked.
        context_length: the context length that it reports; ``None`` if it does not.
    """

    def __init__(
        self, number: int, settings: ReplicaSettings, pool: PoolSettings, clock: Callable[[], float]
    ) -> None:
        self.number = number
        self.weight = settings.weight
        self.transport = Transport(settings.address)
        self.breaker = Breaker(clock, pool.failures, pool.rest_seconds)
        self.read = ReadPrefixes()
        self.outstanding = 0
        self.asked = 0
        self.calls = 0
        self.failed = 0
        self.model = settings.model
        self.own_name = settings.own_name
        self.context_length: int | None = None
        self._clock = clock
        self._check_seconds = pool.check_seconds
        self._check_at = 0.0

    @property
    def probe_due(self) -> bool:
        """Whether it is time to probe its health."""
        return self.breaker.probe_due or (not self.breaker.is_open and self._clock() >= self._check_at)

    def work(self, load: Load) -> float:
        """Tokens that it would have to process if it took a call, divided by its weight."""
        saved = self.read.known(load.blocks) * BLOCK_TOKENS
        return (self.outstanding + max(load.tokens - saved, 0)) / self.weight

    async def probe(self, pool: str, known: str | None) -> None:
        """Check its health by asking it for its models.

        Args:
            pool: name of the pool.
            known: the other replicas' name for the model; ``None`` if none has told it yet.
        """
        self._check_at = self._clock() + self._check_seconds
        was_out = self.breaker.is_open
        try:
            answer = await self.transport.ask(Call("/models"), _PROBE_SECONDS)
            self._take_model(_listed(answer), pool, known)
        except CallError as error:
            if error.fault not in (Fault.BUSY, Fault.REFUSED):  # some servers do not list models
                self.breaker.probe_failed(error.reason)
                return
        if was_out:
            self.read.clear()
        self.breaker.probe_succeeded()

    def _take_model(self, listed: Mapping[str, Mapping[str, Any]], pool: str, known: str | None) -> None:
        """Learn which of the listed models is the pool's.

        Raises:
            CallError: it serves other models.
        """
        if not listed:
            return
        sure = self.model or known
        wanted = [sure] if sure else [pool, next(iter(listed))]
        found = next((name for name in wanted if name in listed), None)
        if found is None:
            shown = ", ".join(name[:64] for name in list(listed)[:4])
            raise CallError(Fault.MISFIT, f"it serves {shown} and not {wanted[0]}")
        self.model = found
        length = listed[found].get("max_model_len")
        if isinstance(length, int) and not isinstance(length, bool) and length > 0:
            self.context_length = length


def _listed(answer: object) -> dict[str, Mapping[str, Any]]:
    """The models of an answer to ``/v1/models``, by name.

    Raises:
        CallError: the answer is not a list of models.
    """
    entries = answer.get("data") if isinstance(answer, Mapping) else None
    if not isinstance(entries, list):
        raise CallError(Fault.MISFIT, "it is no OpenAI server: /v1/models gives no list")
    return {str(entry["id"]): entry for entry in entries if isinstance(entry, Mapping) and entry.get("id")}


class ChunkStream:
    """The chunks of one streamed call, for a thread that waits for them."""

    def __init__(self) -> None:
        self._news: SimpleQueue[Chunk | BaseException | None] = SimpleQueue()
        self._call: Future[None] | None = None

    def run(self, call: Future[None]) -> None:
        """Set the call that produces the chunks."""
        self._call = call
        call.add_done_callback(self._end)

    def put(self, chunk: Chunk) -> None:
        """Add a chunk that has arrived."""
        self._news.put(chunk)

    def next(self) -> list[Chunk]:
        """All chunks that have arrived, at least one; none at the end. :meth:`cancel` ends the waiting.

        Raises:
            UpstreamError: the stream has failed.
            SpecragError: it was cancelled, or refused.
        """
        found: list[Chunk] = []
        news = self._news.get()
        while isinstance(news, Chunk):
            found.append(news)
            try:
                news = self._news.get_nowait()
            except Empty:
                return found
        self._news.put(news)  # for the next call
        if isinstance(news, BaseException) and not found:
            raise news
        return found

    def cancel(self) -> None:
        """End the call; the replica notices that its connection is closed."""
        if self._call is not None:
            self._call.cancel()

    def _end(self, call: Future[None]) -> None:
        try:
            self._news.put(call.exception())
        except CancelledError:
            self._news.put(SpecragError("the call was cancelled"))


@dataclass(slots=True)
class _Sent:
    """What a stream has passed on: nothing before its first token, so that another replica can start over."""

    sink: ChunkStream
    held: list[Chunk] = field(default_factory=list)
    begun: bool = False
    ended: set[int] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)

    def take(self, chunk: Chunk) -> None:
        self.seen.update(piece.index for piece in chunk.pieces)
        self.ended.update(piece.index for piece in chunk.pieces if piece.finish_reason)
        self.held.append(chunk)
        self.begun = self.begun or chunk.is_content
        if self.begun:
            for waiting in self.held:
                self.sink.put(waiting)
            self.held.clear()

    @property
    def is_whole(self) -> bool:
        """Whether at least one choice has ended, and so has every choice that has begun."""
        return bool(self.ended) and self.ended == self.seen

    def start_again(self) -> None:
        """Discard everything that has not been passed on."""
        self.held.clear()
        self.ended.clear()
        self.seen.clear()


class Pool:
    """Replicas of one model. Safe from any thread.

    A call goes to the replica with the least work: its outstanding tokens plus those of the call, minus the tokens that
    it has already read, divided by its weight. A call that fails before its first token is retried on the other
    replicas, on each at most once.

    Args:
        name: the upstream's name, used in errors.
        replicas: where they are.
        settings: how they are judged.
        clock: returns seconds.

    Attributes:
        retries: calls that were passed on to another replica.
        tells_tokens: whether a completion's token ids may be asked for; false once that has been refused.
    """

    def __init__(
        self,
        name: str,
        replicas: Sequence[ReplicaSettings],
        settings: PoolSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        chosen = settings or PoolSettings()
        self.name = name
        self.replicas = [Replica(number, each, chosen, clock) for number, each in enumerate(replicas, 1)]
        self.retries = 0
        self.tells_tokens = True
        self._loop = LoopThread(f"specrag-pool-{name}")
        self._chosen = 0

    def connect(self) -> None:
        """Ask every replica for its models and start watching them. May block for some seconds."""
        self._loop.start(self._probe(self.replicas)).result()
        self._loop.start(self._watch())

    def close(self) -> None:
        """End everything under way and close the connections."""
        self._loop.close(self._close_all)

    # -- what there is --------------------------------------------------------------------------------------

    @property
    def healthy(self) -> int:
        """Replicas that are not left out."""
        return sum(not replica.breaker.is_open for replica in self.replicas)

    @property
    def reasons(self) -> list[str]:
        """Why replicas are left out; reveals no address."""
        return [f"{each.number}: {each.breaker.reason}" for each in self.replicas if each.breaker.is_open]

    @property
    def model(self) -> str | None:
        """The replicas' name for the model; ``None`` until one has told it."""
        return next((each.model for each in self.replicas if each.model and not each.own_name), None)

    @property
    def context_length(self) -> int | None:
        """The smallest context length that a replica reports, in tokens; ``None`` if none does."""
        told = [each.context_length for each in self.replicas if each.context_length is not None]
        return min(told, default=None)

    # -- calls ----------------------------------------------------------------------------------------------

    def begin(self, calls: Sequence[Call]) -> Calls:
        """Start calls."""
        return Calls([self.start(call) for call in calls])

    def start(self, call: Call) -> Future[Any]:
        """Start one call; its result is the JSON answer."""
        return self._loop.start(self._answer(call))

    def ask(self, call: Call) -> Any:
        """Make one call and wait for its JSON answer.

        Raises:
            UpstreamError: no replica answers.
            Refused: the replicas do not serve this kind of call.
            ContextLengthError: the prompt is longer than the model's context.
        """
        return self.begin([call]).next().answer()

    def stream(self, call: Call) -> ChunkStream:
        """Start one streamed call."""
        stream = ChunkStream()
        stream.run(self._loop.start(self._stream(call, stream)))
        return stream

    async def _answer(self, call: Call) -> Any:
        async def attempt(replica: Replica) -> Any:
            answer = await replica.transport.ask(self._addressed(call, replica))
            if call.body is not None:
                read_chunk(answer)  # an unusable answer raises, and the call is retried elsewhere
            return answer

        return await self._by_some_replica(Load.of(call), attempt)

    async def _stream(self, call: Call, stream: ChunkStream) -> None:
        sent = _Sent(stream)

        async def attempt(replica: Replica) -> None:
            sent.start_again()
            try:
                await self._pass_on(replica, self._addressed(call, replica), sent)
            except CallError as error:
                if sent.begun:
                    raise _BrokenOff(error) from None
                raise

        await self._by_some_replica(Load.of(call), attempt)

    async def _pass_on(self, replica: Replica, call: Call, sent: _Sent) -> None:
        try:
            async with aclosing(replica.transport.events(call)) as events:
                async for event in events:
                    sent.take(read_chunk(event))
        except CallError as error:
            if error.fault is not Fault.DROPPED or not sent.is_whole:  # some servers forget the [DONE]
                raise
        if not sent.is_whole:
            raise CallError(Fault.BROKEN, "its answer breaks off")

    def _addressed(self, call: Call, replica: Replica) -> Call:
        """The call with the replica's own name for the model."""
        if call.body is None:
            return call
        return Call(call.path, {**call.body, "model": replica.model or self.model or self.name})

    # -- who is asked ---------------------------------------------------------------------------------------

    async def _by_some_replica(self, load: Load, attempt: Callable[[Replica], Awaitable[T]]) -> T:
        """Give a call to the best replica, and to the next best if it fails.

        Raises:
            UpstreamError, Refused, ContextLengthError: as for :meth:`ask`.
        """
        tried: set[int] = set()
        dropped: set[int] = set()
        last: CallError | None = None
        while (replica := self._choose(load, tried)) is not None:
            self.retries += last is not None
            replica.calls += 1
            replica.outstanding += load.tokens
            replica.read.add(load.blocks)
            try:
                result = await attempt(replica)
            except _BrokenOff as broken:
                self._note(replica, broken.error)
                raise UpstreamError(
                    self.name, f"{broken.error.reason} after the first token; ask again"
                ) from None
            except CallError as error:
                self._note(replica, error)
                if error.fault is Fault.REFUSED:
                    raise self._refused(error.reason) from None
                # The server may just have closed an idle connection, which is no reason to give up on the replica.
                if error.fault is not Fault.DROPPED or replica.number in dropped:
                    tried.add(replica.number)
                dropped.add(replica.number)
                last = error
            else:
                replica.breaker.succeed()
                return result
            finally:
                replica.outstanding -= load.tokens
        raise self._exhausted(last)

    def _choose(self, load: Load, tried: set[int]) -> Replica | None:
        """The replica with the least work; among several, the one that was called longest ago."""
        able = [each for each in self.replicas if each.breaker.is_ready and each.number not in tried]
        if not able:
            return None
        best = min(able, key=lambda replica: (replica.work(load), replica.asked))
        self._chosen += 1
        best.asked = self._chosen
        return best

    def _note(self, replica: Replica, error: CallError) -> None:
        """Record what a failed call says about its replica."""
        if error.fault is Fault.REFUSED:
            replica.breaker.succeed()
            return
        replica.failed += 1
        if error.fault is Fault.BUSY:
            replica.breaker.spare(error.pause)
        else:
            at_once = error.fault in (Fault.UNREACHABLE, Fault.MISFIT)
            replica.breaker.fail(error.reason, at_once=at_once)

    def _refused(self, reason: str) -> SpecragError:
        if "context length" in reason.lower() or "context_length" in reason.lower():
            return ContextLengthError("prompt", "(sent to an upstream)", f"upstream {self.name}: {reason}")
        return UpstreamRefusedError(self.name, reason, status=400)

    def _exhausted(self, last: CallError | None) -> UpstreamError:
        """The error that says why no replica is left."""
        busy = [each.breaker.busy_seconds for each in self.replicas if not each.breaker.is_open]
        if busy and min(busy) > 0:
            return UpstreamError(
                self.name, "it is too busy; ask again later", status=429, retry_after=math.ceil(min(busy))
            )
        if last is not None:
            return UpstreamError(self.name, last.reason, status=last.status, retry_after=1)
        told = "; ".join(self.reasons)
        return UpstreamError(self.name, f"no replica can answer ({told})", status=503, retry_after=2)

    # -- health ---------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Probe replicas that are out once their rest is over, and the others periodically."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await self._probe([replica for replica in self.replicas if replica.probe_due])

    async def _probe(self, replicas: Sequence[Replica]) -> None:
        left = list(replicas)
        while left and self.model is None:  # one after the other: all must serve what the first one serves
            await left.pop(0).probe(self.name, None)
        await asyncio.gather(*(replica.probe(self.name, self.model) for replica in left))

    async def _close_all(self) -> None:
        for replica in self.replicas:
            with suppress(Exception):
                await replica.transport.close()


class UpstreamRefusedError(UpstreamError, Refused):
    """A replica understood a request and does not serve it."""


class _BrokenOff(Exception):  # noqa: N818 - never leaves the pool
    """A stream has failed after its first token."""

    def __init__(self, error: CallError) -> None:
        super().__init__(error.reason)
        self.error = error
