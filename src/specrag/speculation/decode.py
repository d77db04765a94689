"""The one loop of token decoding: propose, score, judge, commit, observe.

Plain decoding is this loop with a drafter that proposes nothing. A method is a choice of drafter, rule and
schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from specrag.engine.outputs import Outputs, Row
from specrag.engine.passes import Coroutine, Emit
from specrag.engine.processors import Chain, LogitsProcessor, State, build_processors
from specrag.engine.sampling import SamplingParams, choose, log_softmax
from specrag.engine.session import Session
from specrag.engine.stopping import FinishReason, StopChecker, StopConditions
from specrag.scheduling.tokens import TokenSchedule
from specrag.speculation.acceptance import matching
from specrag.speculation.drafters.base import Drafter
from specrag.speculation.tree import EMPTY, ROOT, DraftTree, Round, Verdict

#: The source of a token that no drafter proposed.
TARGET = "target"


class TextSink(Protocol):
    """Turns tokens into text as they come (:class:`specrag.models.tokenizer.TextStream`)."""

    def push(self, token: int) -> str:
        """Characters that this token completes."""

    def finish(self) -> str:
        """Characters that were never completed."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could have come, with its log-probability in nats."""

    token: int
    log_prob: float


@dataclass(frozen=True, slots=True)
class DecodedToken:
    """One token of the output.

    Attributes:
        token: its id.
        source: who proposed it: :data:`TARGET`, or the drafter's name for it.
        log_prob: nats, under the model's own distribution (temperature 1, nothing removed or penalised);
            ``None`` unless asked for.
        alternatives: the most probable tokens there, if asked for.
    """

    token: int
    source: str
    log_prob: float | None = None
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What one round added, handed to the caller at once.

    Attributes:
        tokens: the tokens added.
        text: the characters that may be shown now.
        drafted: tokens guessed in the round.
        accepted: guesses that were kept.
        seconds: wall-clock time since the step before.
        finish_reason: why the text has ended, in the last step only.
    """

    tokens: tuple[DecodedToken, ...]
    text: str
    drafted: int
    accepted: int
    seconds: float
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What a caller asks of a decoding.

    Args:
        stop: when to end.
        sampling: how tokens are drawn.
        log_probs: ``None`` for no log-probabilities, else how many alternatives to report beside each token's.
        processors: logits processors of the caller's own, after the built-in ones.
    """

    stop: StopConditions
    sampling: SamplingParams = field(default_factory=SamplingParams)
    log_probs: int | None = None
    processors: Sequence[LogitsProcessor] = ()


def decode(
    session: Session,
    settings: Settings,
    text: TextSink,
    drafter: Drafter,
    schedule: TokenSchedule,
    clock: Callable[[], float] = time.perf_counter,
) -> Coroutine[FinishReason]:
    """Decode behind the session's tokens until a stop condition holds; emits a :class:`Step` a round.

    Raises:
        ContextLengthError: the session is longer than the model's context.
    """
    target = _Target(session, settings)
    checker = StopChecker(settings.stop)
    left = settings.stop.max_tokens
    yield from drafter.start(session)
    last = clock()
    while True:
        room = session.model.context_length - len(session)
        # The bonus token needs no guess: a budget beyond what may still come would be wasted.
        budget = max(min(schedule.next(), left - 1, room), 0)
        tree = EMPTY
        if budget:
            tree = yield from drafter.propose(session, budget)
        rows = yield from session.score(tree, target.outputs)
        verdict = matching(tree, target.draws(tree, rows))

        drawn = target.tokens(tree, rows, verdict)
        shown, reason = "", None
        for count, token in enumerate(drawn, start=1):
            is_stop = token.token in settings.stop.stop_tokens
            piece = checker.push(token.token, "" if is_stop else text.push(token.token))
            shown, reason = shown + piece.text, piece.finish_reason
            if reason is None and len(session) + count > session.model.context_length:
                reason = "length"
            if reason is not None:
                verdict = _cut(verdict, count)
                drawn = drawn[:count]
                break
        session.commit(verdict.path, verdict.bonus)
        committed = tuple(token.token for token in drawn)
        target.advance(committed)
        left -= len(committed)
        drafter.observe(Round(tree, rows, verdict, committed))
        if reason is not None:
            end = checker.finish(text.finish())
            shown, reason = shown + end.text, end.finish_reason or reason
        now = clock()
        seconds, last = now - last, now
        schedule.observe(len(tree), len(verdict.path), seconds)
        yield Emit(Step(tuple(drawn), shown, len(tree), len(verdict.path), seconds, reason))
        if reason is not None:
            return reason


def _cut(verdict: Verdict, count: int) -> Verdict:
    """The verdict as it would be if the text had to end after ``count`` of its tokens."""
    if count > len(verdict.path):
        return verdict
    return Verdict(verdict.path[:count], None)


class _Target:
    """The target's draws along a tree, with the processors' state on every path."""

    def __init__(self, session: Session, settings: Settings) -> None:
        self._session = session
        self._sampling = settings.sampling
        self._log_probs = settings.log_probs
        self._chain: Chain = build_processors(settings.sampling, settings.processors)
        self._state: State = self._chain.start(session.tokens)
        self._processed = bool(self._chain.processors)
        self._greedy = settings.sampling.greedy and not self._processed
        wanted = 0 if settings.log_probs is None else max(settings.log_probs, 1)
        # A greedy draw needs no logits, and its log-probability is the first of the top ones.
        self.outputs = (
            Outputs(argmax=True, top_k=wanted) if self._greedy else Outputs(logits=True, top_k=wanted)
        )

    def draws(self, tree: DraftTree, rows: Sequence[Row]) -> Callable[[int], int]:
        """The draw after each node; must be called from the root downwards."""
        states = {ROOT: self._state}
        positions = {ROOT: len(self._session)}

        def draw(node: int) -> int:
            row = rows[node + 1]
            if node != ROOT:
                parent = tree.parents[node]
                positions[node] = positions[parent] + 1
                if self._processed:
                    states[node] = self._chain.advance(states[parent], tree.tokens[node])
            if self._greedy:
                assert row.argmax is not None
                return row.argmax
            logits = row.logits
            assert logits is not None
            if self._processed:
                logits = self._chain.apply(logits, states[node])
            return choose(logits, self._sampling, positions[node])

        return draw

    def advance(self, tokens: Sequence[int]) -> None:
        """Move the processors' state behind committed tokens."""
        if self._processed:
            for token in tokens:
                self._state = self._chain.advance(self._state, token)

    def tokens(self, tree: DraftTree, rows: Sequence[Row], verdict: Verdict) -> list[DecodedToken]:
        """The verdict's tokens with their sources and log-probabilities."""
        nodes = [ROOT, *verdict.path]
        found = []
        for place, node in enumerate(nodes):
            if place < len(verdict.path):
                step = verdict.path[place]
                token, source = tree.tokens[step], tree.sources[step]
            else:
                assert verdict.bonus is not None
                token, source = verdict.bonus, TARGET
            found.append(self._describe(rows[node + 1], token, source))
        return found

    def _describe(self, row: Row, token: int, source: str) -> DecodedToken:
        if self._log_probs is None:
            return DecodedToken(token, source)
        assert row.top_tokens is not None
        assert row.top_log_probs is not None
        top = [Alternative(int(t), float(p)) for t, p in zip(row.top_tokens, row.top_log_probs, strict=True)]
        log_prob = next((other.log_prob for other in top if other.token == token), None)
        if log_prob is None:
            assert row.logits is not None
            log_prob = float(log_softmax(np.asarray(row.logits))[token])
        return DecodedToken(token, source, log_prob, tuple(top[: self._log_probs]))
