"""The text of iterative retrieval: written one chunk at a time, each after its own passage, and taken back at will.

Nothing is undone when a chunk turns out wrong. A text is a value, so the older one still exists, and a session is
brought in line with whatever text comes next: it keeps their common beginning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from specrag.engine import (
    Chain,
    Coroutine,
    FinishReason,
    Logits,
    PrefixCache,
    Row,
    SamplingParams,
    Session,
    SessionModel,
    State,
    StopChecker,
    StopConditions,
    build_processors,
)
from specrag.methods.base import Decoder, read_prompt
from specrag.methods.events import suppress_events
from specrag.methods.ralmspec.prompts import PassagePrompts, id_of
from specrag.methods.timeline import Timeline
from specrag.models import TextStream, Tokenizer
from specrag.retrieval import Passage
from specrag.speculation import DecodedToken, Settings, Step

#: Passages whose keys and values a request keeps. A quarter of the passages used had been used shortly before.
KEPT = 3


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """The output so far.

    Attributes:
        tokens: the output's tokens.
        stream, checker: their state after these tokens; fork them to continue.
        finish_reason: why the text has ended, if it has.
    """

    tokens: tuple[int, ...]
    stream: TextStream
    checker: StopChecker
    finish_reason: FinishReason | None = None

    @classmethod
    def empty(cls, tokenizer: Tokenizer, stop: StopConditions) -> Text:
        """The text before the first token."""
        return cls((), TextStream(tokenizer), StopChecker(stop))


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Tokens written after one passage.

    Attributes:
        text: the output with them.
        steps: the rounds of the decoder.
        shown: the characters that may be shown now.
        spans: numbers of its times in the timeline.
        prompt_tokens: tokens of the prompt that it was written after.
    """

    text: Text
    steps: tuple[Step, ...]
    shown: str
    spans: tuple[int, ...]
    prompt_tokens: int

    @property
    def tokens(self) -> tuple[DecodedToken, ...]:
        """The chunk's tokens."""
        return tuple(token for step in self.steps for token in step.tokens)


@dataclass(frozen=True, slots=True)
class EarlierPrompts:
    """What requests of one tenant have read before.

    A prompt begins with its passage, so one that was read for another question is reused up to the question.

    Args:
        prefixes: the model's.
        tenant: the tenant.
    """

    prefixes: PrefixCache
    tenant: str = ""

    def start(self, model: SessionModel, tokens: Sequence[int]) -> Session:
        """A session that holds the known beginning of these tokens."""
        return self.prefixes.start(model, tokens, self.tenant)

    def keep(self, session: Session, length: int) -> None:
        """Remember the first tokens of a session."""
        self.prefixes.keep(session, self.tenant, length)

    def has_most(self, model: SessionModel, tokens: Sequence[int]) -> bool:
        """Whether more than half of these tokens need not be read."""
        return self.prefixes.known(model, tokens, self.tenant) > len(tokens) // 2


class ChunkWriter(Protocol):
    """Writes the chunks of one request."""

    def write(self, text: Text, passage: Passage | None) -> Coroutine[Chunk]:
        """Write the next chunk after a text that has not ended; emits nothing."""

    def holds(self, passage: Passage | None) -> bool:
        """Whether this passage's prompt need not be read again, apart from what was written since."""

    def keep(self, passages: Collection[Passage | None]) -> None:
        """Announce that these passages will be needed."""

    def close(self) -> None:
        """Release what is held."""


class Writer:
    """Writes chunks for one request in sessions of a local model; a :class:`ChunkWriter`.

    Args:
        model: the target.
        method: decodes the tokens of a chunk.
        prompts: the prompt for each passage.
        settings: what the caller asks of the whole text.
        interval: tokens of a chunk.
        earlier: prompts of other requests to continue from; the sessions of the newest passages are then kept too. With
            ``None`` every chunk reads its prompt again, as in the paper.
        timeline: records what ran when, and provides the clock.
    """

    def __init__(
        self,
        model: SessionModel,
        method: Decoder,
        prompts: PassagePrompts,
        settings: Settings,
        *,
        interval: int,
        earlier: EarlierPrompts | None,
        timeline: Timeline,
    ) -> None:
        self._model = model
        self._method = method
        self._prompts = prompts
        self._settings = settings
        self._interval = interval
        self._earlier = earlier
        self._timeline = timeline
        self._sessions: dict[int | None, Session] = {}

    def write(self, text: Text, passage: Passage | None) -> Coroutine[Chunk]:
        """Write the next chunk after a text that has not ended; emits nothing."""
        tokens = [*self._prompts.tokens(passage), *text.tokens]
        key = id_of(passage)
        if self._earlier is None:
            self.close()
        session = self._sessions.pop(key, None)
        fresh = session is None
        if session is None:
            session = (
                Session(self._model) if self._earlier is None else self._earlier.start(self._model, tokens)
            )
        self._sessions[key] = session  # the newest last
        place = len(text.tokens)
        with self._timeline.measure("prefill", place) as prefill:
            rows = yield from self._align(session, tokens)
            joined = len(session.pending) > 1
        chunk = Growing(text, self._settings.stop.stop_tokens)
        emitted: list[object] = []
        with self._timeline.measure("decode", place) as decode:
            settings = self._chunk_settings(chunk, len(tokens) - place)
            method = self._method.decode(session, settings, _Silent(), self._timeline.clock, rows)
            yield from suppress_events(method, emitted)
        if fresh and self._earlier is not None:
            self._earlier.keep(session, len(tokens) - place)
        steps = tuple(step for step in emitted if isinstance(step, Step))
        if joined and steps:
            self._timeline.lengthen(prefill.number, decode.number, steps[0].verifying)
        return Chunk(chunk.text(), steps, chunk.shown, (prefill.number, decode.number), len(tokens) - place)

    def holds(self, passage: Passage | None) -> bool:
        """Whether this passage's prompt need not be read again, apart from what was written since."""
        if self._earlier is None:
            return False
        known = id_of(passage) in self._sessions
        return known or self._earlier.has_most(self._model, self._prompts.tokens(passage))

    def keep(self, passages: Collection[Passage | None]) -> None:
        """Release the oldest sessions until :data:`KEPT` are left, but none of these passages."""
        needed = {id_of(passage) for passage in passages}
        others = [key for key in self._sessions if key not in needed]
        for key in others[: max(len(self._sessions) - max(KEPT, len(needed)), 0)]:
            self._sessions.pop(key).close()

    def close(self) -> None:
        """Release all sessions."""
        while self._sessions:
            self._sessions.popitem()[1].close()

    def _align(self, session: Session, tokens: Sequence[int]) -> Coroutine[list[Row]]:
        """Make the session hold these tokens, keeping those that it holds already."""
        shared = next(
            (place for place, (a, b) in enumerate(zip(session.tokens, tokens, strict=False)) if a != b),
            min(len(session), len(tokens)),
        )
        session.truncate(shared)
        if shared == len(tokens):
            return []
        return (yield from read_prompt(session, tokens[shared:], self._method.prompt_needs))

    def _chunk_settings(self, chunk: Growing, prompt_tokens: int) -> Settings:
        whole = self._settings
        place = len(chunk.tokens)
        stop = StopConditions(min(self._interval, whole.stop.max_tokens - place), whole.stop.stop_tokens)
        sampling = replace(whole.sampling, seed=chunk_seed(whole.sampling.seed, place))
        chain = build_processors(whole.sampling, whole.processors)
        if not chain.processors:
            return replace(whole, stop=stop, sampling=sampling, until=chunk.push)
        plain = SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
        )
        resumed = (_Resumed(chain, prompt_tokens),)
        return replace(whole, stop=stop, sampling=plain, processors=resumed, until=chunk.push)


def chunk_seed(seed: int, place: int) -> int:
    """The seed of the chunk that begins with output token ``place``.

    Draws are keyed by the session's length, which depends on the length of its passage: two chunks of one text may pass
    through the same lengths. With a seed for each chunk their draws are still independent.
    """
    text = f"{seed:x}/chunk/{place:x}"
    return int.from_bytes(hashlib.blake2b(text.encode("ascii"), digest_size=8).digest(), "little")


class Growing:
    """A text while a chunk is written after it: follows every token as it comes."""

    def __init__(self, text: Text, stop_tokens: Collection[int]) -> None:
        self.tokens = list(text.tokens)
        self.shown = ""
        self._stream = text.stream.fork()
        self._checker = text.checker.fork()
        self._stop_tokens = stop_tokens
        self._reason: FinishReason | None = None

    def push(self, tokens: Sequence[int]) -> bool:
        """Take the newest of a session's tokens; returns whether the text ends with it."""
        token = tokens[-1]
        self.tokens.append(token)
        piece = self._checker.push(token, "" if token in self._stop_tokens else self._stream.push(token))
        self.shown += piece.text
        self._reason = piece.finish_reason
        if self._reason is not None:
            self.end(self._reason)
        return self._reason is not None

    def end(self, reason: FinishReason) -> None:
        """End the text; what was held back is shown."""
        end = self._checker.finish(self._stream.finish())
        self.shown += end.text
        self._reason = end.finish_reason or reason

    def text(self) -> Text:
        """The text with the chunk."""
        return Text(tuple(self.tokens), self._stream, self._checker, self._reason)


class _Silent:
    """Leaves the text to :class:`Growing`, which sees it across the borders of chunks."""

    def push(self, token: int) -> str:
        del token
        return ""

    def finish(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class _Resumed:
    """Processors in the middle of an output: tokens after the prompt are output that they have already seen."""

    chain: Chain
    prompt_tokens: int

    def start(self, prompt: Sequence[int]) -> State:
        state = self.chain.start(prompt[: self.prompt_tokens])
        for token in prompt[self.prompt_tokens :]:
            state = self.chain.advance(state, token)
        return state

    def advance(self, state: State, token: int) -> State:
        return self.chain.advance(state, token)

    def apply(self, logits: Logits, state: State) -> Logits:
        return self.chain.apply(logits, state)
