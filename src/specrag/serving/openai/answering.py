"""Runs a request that generates texts, from its arrival to its last token: admission, generation, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import anyio
from starlette.requests import Request
from starlette.responses import Response

from specrag.engine import Coroutine, Emit
from specrag.errors import Cancelled, DeadlineExceeded
from specrag.methods import Plan, Relayed
from specrag.models import TextStream, Tokenizer
from specrag.request import Event, Result, Sources, Usage
from specrag.serving.errors import ApiError
from specrag.serving.openai.streaming import EventStream, to_json, until_gone
from specrag.serving.operation.admission import Ticket
from specrag.serving.operation.metrics import FinishedGeneration
from specrag.speculation import TARGET, Step

if TYPE_CHECKING:
    from specrag.engine import Executor
    from specrag.serving.openai.planning import Job, Planner
    from specrag.serving.openai.schemas import TextBody
    from specrag.serving.service import Service


@dataclass(frozen=True, slots=True)
class Ended:
    """A text is complete.

    Attributes:
        result: what its coroutine returned.
    """

    result: Any


@dataclass(frozen=True, slots=True)
class Emission:
    """What one of a request's texts has emitted.

    Attributes:
        index: the text's.
        value: a step, another event of its method, or :class:`Ended`.
    """

    index: int
    value: Any


class RunningTexts:
    """The coroutines of one request, run side by side.

    The first error ends all of them before their next pass, and so does ending the iteration of :meth:`emissions`
    early. The ticket, and its memory with it, is released when the last one has ended in the executor.

    Args:
        executor: runs them.
        starts: make the coroutines.
        ticket: permission to run them.
        deadline: a time on the executor's clock.
        behind: for each text, an earlier one with the same prompt. The text waits for that one's first step, so that
            it finds the keys and values in the prefix cache; ``None`` begins at once.
    """

    def __init__(
        self,
        executor: Executor,
        starts: Sequence[Callable[[], Coroutine[Any]]],
        ticket: Ticket,
        deadline: float | None,
        behind: Sequence[int | None] | None = None,
    ) -> None:
        self._executor = executor
        self._starts = starts
        self._deadline = deadline
        self._behind = behind or [None] * len(starts)
        self._left = _Countdown(len(starts), ticket.release)
        self._news: asyncio.Queue[Emission | Exception | None] = asyncio.Queue()
        self._begun = [asyncio.Event() for _ in starts]

    def interrupt(self, error: Exception) -> None:
        """End all of them; the iteration raises this error."""
        self._news.put_nowait(error)

    async def emissions(self) -> AsyncIterator[Emission]:
        """What the texts emit, and an :class:`Ended` at the end of each. Can be iterated once."""
        pumps = [asyncio.ensure_future(self._pump(index)) for index in range(len(self._starts))]
        try:
            running = len(pumps)
            while running:
                found = await self._news.get()
                if isinstance(found, Exception):
                    raise found
                if found is None:
                    running -= 1
                else:
                    yield found
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, index: int) -> None:
        tracked = _Tracked(self._starts[index], asyncio.get_running_loop(), self._left)
        try:
            first = self._behind[index]
            if first is not None:
                await self._begun[first].wait()
            async with aclosing(self._executor.astream(tracked.run(), deadline=self._deadline)) as emissions:
                async for value in emissions:
                    self._begun[index].set()
                    self._news.put_nowait(Emission(index, value))
            self._news.put_nowait(None)
        except Exception as error:
            self._news.put_nowait(error)
        finally:
            self._begun[index].set()
            if not tracked.began:  # its coroutine will never run, so nothing else counts it
                self._left.count()


class _Countdown:
    """Calls a function after a number of counts."""

    def __init__(self, number: int, then: Callable[[], object]) -> None:
        self._left = number
        self._then = then

    def count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._then()


class _Tracked:
    """A coroutine that reports its end to the event loop; its sessions are closed by then."""

    def __init__(
        self, start: Callable[[], Coroutine[Any]], loop: asyncio.AbstractEventLoop, left: _Countdown
    ) -> None:
        self._start = start
        self._loop = loop
        self._left = left
        self.began = False

    def run(self) -> Coroutine[None]:
        self.began = True
        try:
            result = yield from self._start()
            yield Emit(Ended(result))
        finally:
            # The loop may be closed already if the server was stopped.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._left.count)


#: The source of text that no model wrote, such as a given beginning of an answer.
GIVEN = "given"


@dataclass(slots=True)
class EventDescriber:
    """Describes what one text's method emits.

    Args:
        tokenizer: the model's; ``None`` for one that returns texts and no tokens.
        elapsed: seconds since the request began.
    """

    tokenizer: Tokenizer | None
    elapsed: Callable[[], float]
    _texts: TextStream | None = field(init=False)

    def __post_init__(self) -> None:
        self._texts = None if self.tokenizer is None else TextStream(self.tokenizer)

    def describe(self, emitted: Step | Event) -> dict[str, Any] | None:
        """An event for the client; ``None`` if clients have no use for it."""
        if isinstance(emitted, Step):
            return {"event": "step", **self._step(emitted), "at": self.elapsed()}
        described = emitted.describe()
        return None if described is None else {"event": emitted.name, **described, "at": self.elapsed()}

    def _step(self, step: Step) -> dict[str, Any]:
        tokens = [
            {"text": self._texts.push(token.token), "source": token.source, "relaxed": token.relaxed}
            for token in step.tokens
            if self._texts is not None
        ]
        if step.text and not step.tokens:
            source = TARGET if self._texts is None else GIVEN
            tokens = [{"text": step.text, "source": source, "relaxed": False}]
        return {
            "tokens": tokens,
            "drafted": dict(step.drafted_by),
            "accepted": step.accepted,
            "drafting_seconds": step.drafting,
            "verifying_seconds": step.verifying,
        }


def shown_text(emitted: Step | Event) -> str:
    """The characters that are added to the client's text."""
    return emitted.text if isinstance(emitted, Step) else emitted.text_gained


def _begins(emitted: object) -> bool:
    """Whether an answer now has its first token; what endpoints send has text and no tokens."""
    if isinstance(emitted, Relayed):
        return not emitted.whole
    return isinstance(emitted, Step) and bool(emitted.tokens or emitted.text)


@dataclass(frozen=True, slots=True)
class Finished:
    """A text that has ended.

    Attributes:
        queued, total: seconds from the request's arrival to its place, and to this text's end.
    """

    result: Result
    queued: float
    total: float

    def describe(self, method: str) -> dict[str, Any]:
        """The field ``specrag`` for the text.

        Args:
            method: the method that wrote it.
        """
        result = self.result
        usage = result.describe_usage()
        usage["seconds"] = {"queue": self.queued, **usage["seconds"], "total": self.total}
        details = result.details
        more = {} if details is None else {**details.summary(), "notes": details.notes()}
        sources = [source.describe() for source in result.sources]
        return {"method": method, "sources": sources, "usage": usage, **more}


class Answering:
    """A request's texts.

    Args:
        planner: has made their plans.
        body: the request's.
        job: their plans.
        arrived: when the request arrived, by ``time.perf_counter``.

    Attributes:
        ended: the finished texts, in order; ``None`` for one that has not ended.
    """

    def __init__(self, planner: Planner, body: TextBody, job: Job, arrived: float) -> None:
        self._planner = planner
        self._service = planner.service
        self._model = planner.model
        self._body = body
        self._job = job
        self._arrived = arrived
        allowed, deadline = self._service.settings.deadline, body.extension.deadline
        self._deadline = arrived + (allowed if deadline is None else min(deadline, allowed))
        self._ticket: Ticket | None = None
        self._queued: float | None = None
        self._first: float | None = None
        self._started = False
        self.ended: list[Finished | None] = [None] * len(job.plans)

    @property
    def elapsed(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self._arrived

    def describer(self) -> EventDescriber:
        """An object that describes the events of one text."""
        return EventDescriber(self._model.tokenizer, lambda: self.elapsed)

    async def enter(self) -> None:
        """Wait for a place; give it back with :meth:`leave_unused`.

        Raises:
            ApiError: the request is refused.
            DeadlineExceeded: no place was free in time.
        """
        plans = self._job.plans
        amount = sum(self._model.bytes_for(plan.tokens) for plan in plans)
        waiting = self._service.admission.enter(len(plans), amount)
        try:
            # Not wait_for, which swallows a cancellation that arrives together with the place (Python 3.11).
            async with asyncio.timeout(max(self._deadline - time.perf_counter(), 0.001)):
                self._ticket = await waiting
        except TimeoutError:
            self._count_failure("deadline")
            raise DeadlineExceeded("the request's time was over before there was a place for it") from None
        self._queued = self.elapsed

    def leave_unused(self) -> None:
        """Give the place back if the texts were never run; otherwise their end does it."""
        if self._ticket is not None and not self._started:
            self._ticket.release()

    @property
    def finished(self) -> list[Result]:
        """The results, once all texts have ended."""
        return [ended.result for ended in self.ended if ended is not None]

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's; ``None`` for one that returns texts and no tokens."""
        return self._model.tokenizer

    @property
    def fingerprint(self) -> str:
        """Identifies what computes: equal fingerprints give equal texts for equal seeds, as far as rounding allows."""
        return self._model.fingerprint

    def result(self, index: int) -> Result:
        """The result of a text that has ended."""
        return self._of(index).result

    def describe(self, index: int) -> dict[str, Any]:
        """The field ``specrag`` for one text that has ended."""
        return self._of(index).describe(self._job.method.name)

    def _of(self, index: int) -> Finished:
        ended = self.ended[index]
        assert ended is not None
        return ended

    def summary(self) -> dict[str, Any]:
        """The field ``specrag`` of an answer: that of its first text, with those of the others in ``others``."""
        first, *others = [self.describe(index) for index in range(len(self.ended))]
        return {**first, "others": others} if others else first

    async def emissions(self) -> AsyncIterator[Emission]:
        """Run the texts; yields what they emit, and an :class:`~specrag.serving.openai.answering.Ended` for each."""
        assert self._ticket is not None  # entered before
        self._started = True
        plans = self._job.plans
        behind = same_prompts(plans) if self._model.keeps_prompts else None
        starts = [plan.begin for plan in plans]
        texts = RunningTexts(self._model.executor, starts, self._ticket, self._deadline, behind)
        self._service.running.add(texts)
        try:
            with self._planner.named(self._body.extension, self._job.method):
                async with aclosing(texts.emissions()) as emissions:  # type: ignore[type-var]
                    async for emission in emissions:
                        self._note(emission)
                        yield emission
        except (GeneratorExit, asyncio.CancelledError, Cancelled):
            self._count_failure("cancelled")
            raise
        except DeadlineExceeded:
            self._count_failure("deadline")
            raise
        except Exception:
            self._count_failure("error")
            raise
        finally:
            self._service.running.discard(texts)

    def _note(self, emission: Emission) -> None:
        value = emission.value
        if isinstance(value, Ended):
            self.ended[emission.index] = Finished(value.result, self._queued or 0.0, self.elapsed)
            self._count(value.result, value.result.finish_reason)
        elif self._first is None and _begins(value):
            self._first = self.elapsed
        elif isinstance(value, Sources) and self._service.searches is not None:
            found = len(value.sources) + len(value.left_out)
            self._service.searches(value.retrieval_seconds, found)

    def _count(self, result: Result | None, reason: str) -> None:
        told = self._service.settings.log_prompts
        usage = Usage(0, 0, 0, 0, {}, {}) if result is None else result.usage
        figures = FinishedGeneration(
            method=self._job.method.name,
            reason=reason,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            passes=usage.passes,
            drafted_by=usage.drafted_by,
            accepted_by=usage.accepted_by,
            total=self.elapsed,
            queued=self._queued,
            first_token=self._first,
            prompt=self._prompt() if told else None,
            answer=("" if result is None else result.text) if told else None,
        )
        for observer in self._service.observers:
            observer(figures)

    def _prompt(self) -> str:
        """What was sent as a prompt."""
        sent = self._body.model_dump(mode="json", exclude_none=True)[self._planner.prompt_field]
        return json.dumps(sent, ensure_ascii=False)

    def _count_failure(self, reason: str) -> None:
        for ended in self.ended:
            if ended is None:
                self._count(None, reason)


def same_prompts(plans: Sequence[Plan]) -> list[int | None]:
    """For each plan, the index of the first one with the same prompt; ``None`` for that one itself."""
    first: dict[tuple[int, ...], int] = {}
    found: list[int | None] = []
    for index, plan in enumerate(plans):
        known = first.get(plan.prompt) if plan.prompt else None
        found.append(known)
        if plan.prompt and known is None:
            first[plan.prompt] = index
    return found


class WritesAnswer(Protocol):
    """Puts an answer into OpenAI's form."""

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""

    def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer in chunks, as it is written."""


async def respond(request: Request, answering: Answering, writer: WritesAnswer, *, stream: bool) -> Response:
    """Answer once a place is free; end the work if the client goes away."""
    if not stream:
        try:
            content = await until_gone(request.receive, _written(writer))
            return Response(content, media_type="application/json")
        finally:
            answering.leave_unused()
    try:
        await until_gone(request.receive, answering.enter())
    except BaseException:
        answering.leave_unused()  # a place may have been granted just as the client went
        raise
    return EventStream(writer.chunks(), answering.leave_unused)


async def _written(writer: WritesAnswer) -> bytes:
    whole = await writer.whole()
    return await anyio.to_thread.run_sync(to_json, whole)


def service_of(request: Request) -> Service:
    """The server's service, ready to answer.

    Raises:
        ApiError: it is not ready, or is stopping.
    """
    service: Service = request.app.state.service
    if service.state == "stopping":
        raise ApiError(503, "the server is being stopped", code="stopping", headers={"Retry-After": "10"})
    service.check_loaded()
    return service
