"""A drafter that writes given texts: for drafts that no real model can be made to write, and for one that dies."""

from __future__ import annotations

import re
from collections.abc import Sequence

from specrag.engine.passes import Coroutine, Emit, Search
from specrag.models.roles import GeneratedText, TextDelta, TextDone, TextPrompt, TextRequest, TextToken


class ScriptedDrafter:
    """Writes the given texts in order, a word a token.

    Args:
        texts: one for each request.
        log_prob: of every token; ``None`` for a model that does not tell.
        dies: raised after the first text.
    """

    name = "scripted"
    context_length = None

    def __init__(
        self, texts: Sequence[str], log_prob: float | None = -0.5, dies: Exception | None = None
    ) -> None:
        self.texts = texts
        self.log_prob = log_prob
        self.dies = dies
        self.requests: list[TextRequest] = []

    def count(self, prompt: TextPrompt, lead: str = "") -> int:
        return len(str(prompt).split()) + len(lead.split())

    def generating(self, requests: Sequence[TextRequest]) -> Coroutine[list[GeneratedText]]:
        self.requests = list(requests)
        return self._generating(len(requests))

    def _generating(self, count: int) -> Coroutine[list[GeneratedText]]:
        written = []
        for number, text in enumerate(self.texts[:count]):
            if number and self.dies is not None:
                yield Search(self._die)
            tokens = [TextToken(piece, self.log_prob) for piece in re.findall(r"\s*\S+|\s+$", text)]
            tokens.append(TextToken("", self.log_prob))
            written.append(GeneratedText(text, tuple(tokens), "stop", 9, 9, 0, 0.0))
            yield Emit(TextDelta(number, text))
            yield Emit(TextDone(number, written[-1]))
        return written

    def _die(self) -> None:
        assert self.dies is not None
        raise self.dies
