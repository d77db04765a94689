"""Chunks of iterative retrieval by a model behind endpoints: one call of ``/v1/completions`` each.

A chunk is a function of the passage and of the text so far, as with a local model. The endpoint remembers what it has
read of a prompt; its prefix cache takes the place of sessions.
"""

from __future__ import annotations

from collections.abc import Collection

from specrag.engine import Coroutine
from specrag.methods.ralmspec.prompts import PassagePrompts, id_of
from specrag.methods.ralmspec.text import Chunk, Growing, Text, chunk_seed
from specrag.methods.remote import TokenEndpoint, Written
from specrag.methods.timeline import Timeline
from specrag.request import Options
from specrag.retrieval import Passage
from specrag.speculation import TARGET, DecodedToken, Settings, Step


class EndpointWriter:
    """Writes chunks for one request; a :class:`~specrag.methods.ralmspec.text.ChunkWriter`.

    Args:
        model: the target.
        prompts: the prompt for each passage.
        settings: what the caller asks of the whole text.
        options: the same, as every call takes it.
        interval: tokens of a chunk.
        timeline: records what ran when.
    """

    def __init__(
        self,
        model: TokenEndpoint,
        prompts: PassagePrompts,
        settings: Settings,
        options: Options,
        *,
        interval: int,
        timeline: Timeline,
    ) -> None:
        self._model = model
        self._prompts = prompts
        self._settings = settings
        self._options = options
        self._interval = interval
        self._timeline = timeline
        self._sent: set[int | None] = set()

    def write(self, text: Text, passage: Passage | None) -> Coroutine[Chunk]:
        prompt, place = self._prompts.tokens(passage), len(text.tokens)
        with self._timeline.measure("decode", place) as decode:
            written = yield from self._written([*prompt, *text.tokens], place)
        self._sent.add(id_of(passage))
        growing = Growing(text, self._settings.stop.stop_tokens)
        has_ended = any(growing.push((token,)) for token in written.tokens)
        if not has_ended and (written.ended or not written.tokens):
            growing.end("stop" if written.ended else "length")
        new = tuple(DecodedToken(token, TARGET) for token in growing.tokens[place:])
        step = Step(new, growing.shown, {}, 0, seconds=self._timeline.seconds((decode.number,)))
        return Chunk(growing.text(), (step,), growing.shown, (decode.number,), len(prompt))

    def holds(self, passage: Passage | None) -> bool:
        """Whether the endpoint has read this passage's prompt for this request, and may remember it."""
        return id_of(passage) in self._sent

    def keep(self, passages: Collection[Passage | None]) -> None:
        """Do nothing: the endpoint decides what it remembers."""

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def _written(self, tokens: list[int], place: int) -> Coroutine[Written]:
        """The next tokens; more than a chunk's if those are only the beginning of a character."""
        left = self._settings.stop.max_tokens - place
        # A seed has 64 bits here, and 63 in vLLM.
        seed = chunk_seed(self._settings.sampling.seed, place) >> 2
        options: Options = {**self._options, "seed": seed}
        most = min(self._interval, left)
        while True:
            written = yield from self._model.writing(tokens, most, options)
            if written.tokens or written.ended or most == left:
                return written
            most = min(most + self._interval, left)
