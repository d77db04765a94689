"""A writer that answers by rule, for rows that no small model can be relied on to give; and passages with facts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specrag.engine.passes import Coroutine, Search
from specrag.errors import EndpointUnavailable
from specrag.models.roles import GeneratedText, TextPrompt, TextRequest
from tests.models.endpoint_server import CannedBackend, Token

_FIRST = ("Anna", "Ben", "Carla", "David", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas")
_LAST = ("Berg", "Castor", "Dahl", "Evers", "Frey", "Garn", "Holm")
_THINGS = ("heron", "lantern", "violin", "anchor", "fountain", "clock")


def write_passages(folder: Path, *, count: int = 40) -> Path:
    """Passages of carvings: each has a title, a carver of its own and a year, as JSON lines."""
    path = folder / "passages.jsonl"
    rows = [
        {
            "title": title(number),
            "text": f"The {title(number)} was carved by {carver(number)} in {1800 + number}. It stands in a town by "
            "the sea, where people meet in summer to trade fish, bread and cloth, and in winter to tell stories.",
        }
        for number in range(count)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def title(number: int) -> str:
    return f"Great {_THINGS[number % len(_THINGS)]} of {_LAST[number % len(_LAST)]}ville {number}"


def carver(number: int) -> str:
    return f"{_FIRST[number % len(_FIRST)]} {_LAST[number // len(_FIRST) % len(_LAST)]}"


def asks_for_carver(request: TextRequest) -> str:
    """A question about the passage that was read last, or the statement of one."""
    return carver_asked(last(request), statement=request.lead == "Statement:")


def carver_asked(said: str, *, statement: bool) -> str:
    """As :func:`asks_for_carver`, of the text that was read last."""
    if statement:
        found = re.search(r"Who carved the (.*)\?\nAnswer: (.*)\n", said)
        assert found is not None
        return f" The {found[1]} was carved by {found[2]}."
    found = re.search(r"The (.*) was carved by (\w+ \w+) in", said)
    assert found is not None
    return f" Who carved the {found[1]}?\nAnswer: {found[2]}"


def last(request: TextRequest) -> str:
    """What was asked last."""
    assert not isinstance(request.prompt, str)
    return request.prompt[-1]["content"]


class RuleWriter:
    """Writes what a rule says.

    Args:
        rule: from a request to its text.
        lives: texts until it dies; ``None`` for ever.
    """

    name = "rule"
    context_length = None

    def __init__(self, rule: Callable[[TextRequest], str], lives: int | None = None) -> None:
        self.rule = rule
        self.lives = lives
        self.requests: list[TextRequest] = []

    def count(self, prompt: TextPrompt, lead: str = "") -> int:
        return len(str(prompt).split()) + len(lead.split())

    def generating(self, requests: Sequence[TextRequest]) -> Coroutine[list[GeneratedText]]:
        written = []
        for request in requests:
            if self.lives is not None and len(self.requests) == self.lives:
                yield Search(self._die)
            self.requests.append(request)
            written.append(GeneratedText(self.rule(request), (), "stop", 9, 9, 0, 0.0))
        return written

    def _die(self) -> None:
        raise EndpointUnavailable("rule: it went away")


class RuleBackend(CannedBackend):
    """The same behind an endpoint."""

    def write(self, tokens: Sequence[int], body: Mapping[str, Any]) -> tuple[str, list[Token], str]:
        super().write(tokens, body)
        said = "".join(map(chr, tokens)).split("<user>")[-1]
        if said.endswith("Answer:"):
            found = re.search(r"carved by (\w+ \w+) in", said)
            text = "" if found is None else f" {found[1]}"
        else:
            text = carver_asked(said, statement=said.endswith("Statement:"))
        if "\n" in body.get("stop", ()):
            text = text.split("\n")[0]
        return text, [Token(1, text, -0.5)], "stop"
