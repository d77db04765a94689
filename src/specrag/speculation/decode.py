"""The decoding loop of token speculation: propose, score, judge, commit, observe.

Plain decoding is this loop with a drafter that proposes nothing. A method is a choice of drafter, rule and
schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

from specrag.engine import (
    Coroutine,
    Emit,
    FinishReason,
    LogitsProcessor,
    Row,
    SamplingParams,
    Session,
    StopChecker,
    StopConditions,
)
from specrag.speculation.acceptance import Rule
from specrag.speculation.drafters.base import Drafter, Stopwatch
from specrag.speculation.schedule.base import Timed, TokenSchedule
from specrag.speculation.target import Alternative, Target
from specrag.speculation.tree import EMPTY, DraftTree, Round, Verdict

#: The source of a token that no drafter proposed.
TARGET = "target"


class TextSink(Protocol):
    """Incremental detokeniser (:class:`specrag.models.tokenizer.TextStream`)."""

    def push(self, token: int) -> str:
        """Characters that this token completes."""

    def finish(self) -> str:
        """Characters that were never completed."""


@dataclass(frozen=True, slots=True)
class DecodedToken:
    """One token of the output.

    Attributes:
        token: its id.
        source: who proposed it: :data:`TARGET`, or the drafter's name for it.
        log_prob: nats, under the model's own distribution (temperature 1, nothing removed or penalised);
            ``None`` unless requested.
        alternatives: the most probable tokens there, if requested.
        relaxed: accepted although the target would have chosen another; never by a lossless rule.
    """

    token: int
    source: str
    log_prob: float | None = None
    alternatives: tuple[Alternative, ...] = ()
    relaxed: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What one round added, emitted at once.

    Attributes:
        tokens: the tokens added.
        text: the characters that may be shown now.
        drafted_by: tokens guessed in the round, by source.
        accepted: guesses that were kept.
        seconds: wall-clock time since the previous step.
        drafting: seconds of it until the draft was made.
        verifying: seconds of it in the target's pass, including waiting for others.
        finish_reason: why the text has ended, only in the last step.
        reading: seconds of it in which the drafter read its prompt.
    """

    tokens: tuple[DecodedToken, ...]
    text: str
    drafted_by: Mapping[str, int]
    accepted: int
    seconds: float
    drafting: float = 0.0
    verifying: float = 0.0
    finish_reason: FinishReason | None = None
    reading: float = 0.0

    @property
    def drafted(self) -> int:
        """Tokens guessed in the round."""
        return sum(self.drafted_by.values())


@dataclass(frozen=True, slots=True)
class Settings:
    """Per-request settings of the decoding loop.

    Args:
        stop: when to end.
        sampling: how tokens are drawn.
        log_probs: ``None`` for no log-probabilities, else how many alternatives to report beside each token's.
        processors: the caller's own logits processors, applied after the built-in ones.
        references: texts that the output may quote, as tokens; a drafter may copy from them.
        until: called after every new token with all tokens, starting with the prompt's; if it returns true, the text
            ends there, including that token, with the reason ``"stop"``.
    """

    stop: StopConditions
    sampling: SamplingParams = field(default_factory=SamplingParams)
    log_probs: int | None = None
    processors: Sequence[LogitsProcessor] = ()
    references: tuple[tuple[int, ...], ...] = ()
    until: Callable[[Sequence[int]], bool] | None = None


@dataclass(frozen=True, slots=True)
class Speculation:
    """The drafter, acceptance rule and schedule of one request.

    Args:
        drafter: proposes tokens; made for this request, closed at its end.
        rule: accepts guesses.
        schedule: decides how much to guess; belongs to this request.
        watch: runs while the drafter reads its prompt, if that waits for the first proposal; ``None`` if it is part of
            the start.
    """

    drafter: Drafter
    rule: Rule
    schedule: TokenSchedule
    watch: Stopwatch | None = None


def decode(
    session: Session,
    settings: Settings,
    text: TextSink,
    speculation: Speculation,
    clock: Callable[[], float],
    prompt_rows: Sequence[Row] = (),
) -> Coroutine[FinishReason]:
    """Decode after the session's tokens until a stop condition holds; emits one :class:`Step` per round.

    Args:
        session: holds the prompt.
        settings: what the caller asks for.
        text: turns tokens into characters.
        speculation: how to guess and check; its drafter is closed at the end.
        clock: seconds.
        prompt_rows: the target's answers for the prompt's last tokens, as far as the drafter asked for them.

    Raises:
        ContextLengthError: the session is longer than the model's context.
    """
    rule, schedule, watch = speculation.rule, speculation.schedule, speculation.watch
    with closing(speculation.drafter) as drafter:
        target = Target(
            session, settings.sampling, settings.log_probs, settings.processors, rule.needs, drafter.outputs
        )
        checker = StopChecker(settings.stop)
        left = settings.stop.max_tokens
        last = clock()
        yield from drafter.start(session, prompt_rows)
        reading = clock() - last if watch is None else 0.0
        while True:
            began = clock()
            # The end of the prompt is in this round's pass, so its time says nothing about a usual round. It has many
            # rows, and a chain of guesses after them is read in the same way.
            joined = len(session.pending) > 1
            room = session.model.context_length - len(session)
            # The bonus token needs no guess, and a path longer than what may still come would be wasted.
            depth = max(min(left - 1, room), 0)
            # Asked in every round, whatever may come.
            budget = schedule.budget(runs_passes=drafter.runs_passes)
            budget = budget if depth else 0
            proposed, read_before = EMPTY, 0.0 if watch is None else watch.seconds
            if budget or rule.needs.opinions:
                proposed = yield from drafter.propose(session, budget, depth)
            tree = schedule.choose(proposed, len(session))
            tree = tree.trunk() if joined else tree
            asked, read = clock(), 0.0 if watch is None else watch.seconds - read_before
            reading += read
            rows = yield from session.score(tree, target.outputs)
            answered = clock()
            verdict = rule.judge(tree, target.view(tree, rows))

            drawn = _tokens(target, tree, rows, verdict)
            written = _write(drawn, session, settings, text, checker)
            drawn, shown, reason = drawn[: written.count], written.text, written.finish_reason
            if reason is not None:
                verdict = _cut(verdict, written.count)
            session.commit(verdict.path, verdict.bonus)
            committed = tuple(token.token for token in drawn)
            target.advance(committed)
            left -= len(committed)
            round = Round(tree, rows, verdict, committed, proposed)
            drafter.observe(round)
            if reason is not None:
                end = checker.finish(text.finish())
                shown, reason = shown + end.text, end.finish_reason or reason
            now = clock()
            drafting, verifying = asked - began - read, answered - asked
            context = len(session) - len(committed)
            if not joined:
                timed = Timed(context, drafting, verifying, now - began - read, session.report)
                schedule.observe(round, timed)
            yield Emit(
                Step(
                    tuple(drawn),
                    shown,
                    Counter(tree.sources),
                    len(verdict.path),
                    now - last,
                    drafting,
                    verifying,
                    reason,
                    reading,
                )
            )
            last, reading = now, 0.0
            if reason is not None:
                return reason


def _tokens(target: Target, tree: DraftTree, rows: Sequence[Row], verdict: Verdict) -> list[DecodedToken]:
    """The verdict's tokens with their sources and log-probabilities."""
    found = []
    before = 0  # the row that a token follows: 0 is the session's newest token
    for node in verdict.path:
        told = target.describe(rows[before], tree.tokens[node])
        found.append(
            DecodedToken(
                tree.tokens[node],
                tree.sources[node],
                told.log_prob,
                told.alternatives,
                node in verdict.relaxed,
            )
        )
        before = node + 1
    assert verdict.bonus is not None
    told = target.describe(rows[before], verdict.bonus)
    found.append(DecodedToken(verdict.bonus, TARGET, told.log_prob, told.alternatives))
    return found


@dataclass(frozen=True, slots=True)
class _Written:
    """How many of a round's tokens belong to the text, what they add to it, and why it ends there, if it does."""

    count: int
    text: str
    finish_reason: FinishReason | None


def _write(
    drawn: Sequence[DecodedToken], session: Session, settings: Settings, text: TextSink, checker: StopChecker
) -> _Written:
    """Turn a round's tokens into text, up to where a stop condition or the context's end holds."""
    shown, reason = "", None
    for count, token in enumerate(drawn, start=1):
        is_stop = token.token in settings.stop.stop_tokens
        piece = checker.push(token.token, "" if is_stop else text.push(token.token))
        shown, reason = shown + piece.text, piece.finish_reason
        if settings.until is not None and settings.until(
            [*session.tokens, *(earlier.token for earlier in drawn[:count])]
        ):
            reason = reason or "stop"
        if reason is None and len(session) + count > session.model.context_length:
            reason = "length"
        if reason is not None:
            return _Written(count, shown, reason)
    return _Written(len(drawn), shown, None)


def _cut(verdict: Verdict, count: int) -> Verdict:
    """The verdict if the text has to end after ``count`` of its tokens."""
    if count > len(verdict.path):
        return verdict
    path = verdict.path[:count]
    return Verdict(path, None, verdict.relaxed & frozenset(path))
