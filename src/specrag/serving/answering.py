"""One request that generates texts, from its arrival to its last token: waits for its place, runs, is counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol

import anyio
from starlette.requests import Request
from starlette.responses import Response

from specrag.errors import Cancelled, DeadlineExceeded
from specrag.methods.answer import Sources
from specrag.serving.admission import Ticket
from specrag.serving.events import Teller
from specrag.serving.large_json import to_json
from specrag.serving.metrics import FinishedGeneration
from specrag.serving.outcome import Outcome, describe_source, outcome_of
from specrag.serving.plans import Plan, same_prompts
from specrag.serving.problems import ApiError
from specrag.serving.running import Emission, Ended, RunningTexts
from specrag.serving.streaming import EventStream, unless_gone
from specrag.speculation.decode import Step

if TYPE_CHECKING:
    from specrag.serving.service import Service


class Answering:
    """A request's texts.

    Args:
        service: runs them.
        method: by which they are written.
        plans: one a text.
        said: makes a text of what was sent, for a log that may hold it.
        arrived: when the request came, by ``time.perf_counter``.
        deadline: seconds from there that the client allows; at most those of the settings.

    Attributes:
        outcomes: of the texts, in their order; ``None`` for one that has not ended.
    """

    def __init__(
        self,
        service: Service,
        method: str,
        plans: Sequence[Plan],
        said: Callable[[], str],
        arrived: float,
        deadline: float | None,
    ) -> None:
        self._service = service
        self._method = method
        self._plans = plans
        self._said = said
        self._arrived = arrived
        allowed = service.settings.deadline
        self._deadline = arrived + (allowed if deadline is None else min(deadline, allowed))
        self._ticket: Ticket | None = None
        self._queued: float | None = None
        self._first: float | None = None
        self._started = False
        self.outcomes: list[Outcome | None] = [None] * len(plans)

    @property
    def elapsed(self) -> float:
        """Seconds since the request came."""
        return time.perf_counter() - self._arrived

    def teller(self) -> Teller:
        """Describes the events of one of the texts."""
        return Teller(self._service.llm.tokenizer, lambda: self.elapsed)

    async def enter(self) -> None:
        """Wait for a place; give it back with :meth:`leave_unused`.

        Raises:
            ApiError: there is none to be had.
            DeadlineExceeded: it did not come in time.
        """
        amount = sum(self._service.bytes_for(plan.tokens) for plan in self._plans)
        waiting = self._service.admission.enter(len(self._plans), amount)
        try:
            # Not wait_for, which swallows a cancellation that comes as the place does (Python 3.11).
            async with asyncio.timeout(max(self._deadline - time.perf_counter(), 0.001)):
                self._ticket = await waiting
        except TimeoutError:
            self._count_failure("deadline")
            raise DeadlineExceeded("the request's time was over before there was a place for it") from None
        self._queued = self.elapsed

    def leave_unused(self) -> None:
        """Give the place back if the texts were never run; else their end does."""
        if self._ticket is not None and not self._started:
            self._ticket.release()

    @property
    def finished(self) -> list[Outcome]:
        """The outcomes, once all texts have ended."""
        return [outcome for outcome in self.outcomes if outcome is not None]

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a text and are no part of it."""
        return self._service.llm.tokenizer.eos_tokens

    @property
    def fingerprint(self) -> str:
        """Of what computes: equal ones give equal texts for equal seeds, as far as rounding allows."""
        loaded = self._service.llm.loaded
        return f"specrag-{version('specrag')}-{loaded.dtype}-{loaded.device}"

    def describe(self, outcome: Outcome) -> dict[str, Any]:
        """The field ``specrag`` for one text."""
        sources = [describe_source(source) for source in outcome.sources]
        return {"method": self._method, "sources": sources, "usage": outcome.usage, **outcome.more}

    def summary(self) -> dict[str, Any]:
        """The field ``specrag`` of an answer: of its first text, and of the others behind it."""
        first, *others = [self.describe(outcome) for outcome in self.finished]
        return {**first, "others": others} if others else first

    async def emissions(self) -> AsyncIterator[Emission]:
        """Run the texts; what they emit, and an :class:`~specrag.serving.running.Ended` for each."""
        assert self._ticket is not None  # entered before
        self._started = True
        llm = self._service.llm
        behind = same_prompts(self._plans) if llm.prefixes.limit_bytes else None
        starts = [plan.start for plan in self._plans]
        texts = RunningTexts(llm.executor, starts, self._ticket, self._deadline, behind)
        self._service.running.add(texts)
        try:
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
            outcome = outcome_of(value.result)
            seconds = {"queue": self._queued or 0.0, **outcome.seconds, "total": self.elapsed}
            outcome = replace(outcome, seconds=seconds)
            self.outcomes[emission.index] = outcome
            self._count(outcome, outcome.finish_reason)
        elif self._first is None and isinstance(value, Step) and value.tokens:
            self._first = self.elapsed
        elif isinstance(value, Sources) and self._service.searches is not None:
            found = len(value.sources) + len(value.left_out)
            self._service.searches(value.retrieval_seconds, found)

    def _count(self, outcome: Outcome, reason: str) -> None:
        told = self._service.settings.log_prompts
        figures = FinishedGeneration(
            method=self._method,
            reason=reason,
            prompt_tokens=outcome.prompt_tokens,
            cached_tokens=outcome.cached_tokens,
            completion_tokens=outcome.completion_tokens,
            passes=outcome.passes,
            drafted_by=outcome.drafted_by,
            accepted_by=outcome.accepted_by,
            total=self.elapsed,
            queued=self._queued,
            first_token=self._first,
            prompt=self._said() if told else None,
            answer=outcome.text if told else None,
        )
        for observer in self._service.observers:
            observer(figures)

    def _count_failure(self, reason: str) -> None:
        for outcome in self.outcomes:
            if outcome is None:
                self._count(Outcome("", "stop", 0, 0), reason)


class AnswerWriter(Protocol):
    """Puts an answer into OpenAI's form."""

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""

    def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer as it comes."""


async def respond(request: Request, answering: Answering, writer: AnswerWriter, *, stream: bool) -> Response:
    """Answer when a place is free; end the work if the client goes away."""
    if not stream:
        try:
            content = await unless_gone(request, _written(writer))
            return Response(content, media_type="application/json")
        finally:
            answering.leave_unused()
    try:
        await unless_gone(request, answering.enter())
    except BaseException:
        answering.leave_unused()  # a place may have been given in the moment that the client went
        raise
    return EventStream(writer.chunks(), answering.leave_unused)


async def _written(writer: AnswerWriter) -> bytes:
    whole = await writer.whole()
    return await anyio.to_thread.run_sync(to_json, whole)


def service_of(request: Request) -> Service:
    """The server's service, ready to answer.

    Raises:
        ApiError: it is not ready, or stops.
    """
    service: Service = request.app.state.service
    if service.state == "stopping":
        raise ApiError(503, "the server is being stopped", code="stopping", headers={"Retry-After": "10"})
    service.llm  # noqa: B018 - raises while it is being loaded
    return service
