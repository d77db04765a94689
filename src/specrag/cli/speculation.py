"""How guessing is chosen on the command line, and how it is shown."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specrag.cli import common
from specrag.errors import InputError

if TYPE_CHECKING:
    from rich.text import Text

    from specrag.methods.base import DecodingMethod
    from specrag.methods.generation import Usage
    from specrag.models.tokenizer import TextStream
    from specrag.speculation.decode import Step

#: Methods that are nothing without ``--drafter``.
WITH_DRAFTER = ("draft-model", "eagle-2")

_PANEL = "Speculation"

Method = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="How to decode: plain, respec, or one of its rivals (prompt-lookup, token-recycling, "
        "sam-decoding, draft-model, eagle-2).",
        rich_help_panel=_PANEL,
    ),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Who guesses where nothing can be copied: recycling, lookup, none, model:NAME, or eagle:NAME. Of "
        "rapid: self or a model. Of "
        "speculative-rag: who writes drafts, a model or http://HOST:PORT/v1#MODEL.",
        rich_help_panel=_PANEL,
    ),
]
Corpus = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="A text to copy from, made by index --corpus (respec).",
        rich_help_panel=_PANEL,
    ),
]
Relaxed = Annotated[
    bool,
    typer.Option(
        "--relaxed",
        help="Accept copied tokens near the model's choice: faster, another text (respec, greedy).",
        rich_help_panel=_PANEL,
    ),
]
Tolerance = Annotated[
    float,
    typer.Option(
        parser=common.number,
        metavar="NATS",
        help="How far below the best a relaxed token may be.",
        rich_help_panel=_PANEL,
    ),
]
ShowSources = Annotated[
    bool,
    typer.Option("--show-sources", help="Colour each token by who guessed it.", rich_help_panel=_PANEL),
]

_COLOURS = {
    "suffix": "green",
    "reference": "cyan",
    "corpus": "blue",
    "recycling": "yellow",
    "lookup": "green",
    "draft-model": "magenta",
    "eagle": "magenta",
}
_RELAXED = "red"


def check_method(name: str, *others: str, field: str = "--method", purpose: str = "") -> None:
    """Check that a command takes a method of this name.

    Args:
        others: names that it takes besides the methods that decode tokens.
        field: the option.
        purpose: of the methods, for the message.

    Raises:
        InputError: it does not.
    """
    from specrag.methods import registry

    known = tuple(dict.fromkeys((*registry.METHODS, *WITH_DRAFTER, *others)))
    registry.check_method(name, field, known, purpose)


def method_of(
    name: str, drafter: str | None, relaxed: bool, tolerance: float, corpus: Path | None
) -> str | DecodingMethod:
    """The method that the options describe.

    Raises:
        InputError: they do not fit together.
    """
    if name == "respec":
        from specrag.methods.respec import ReSpec
        from specrag.speculation.suffix.corpus import SuffixCorpus

        copied = None if corpus is None else SuffixCorpus.open(corpus.expanduser())
        return ReSpec(drafter=drafter or "recycling", relaxed=relaxed, tolerance=tolerance, corpus=copied)
    if corpus is not None:
        raise InputError("--corpus", str(corpus), "only --method respec copies from one; leave it out")
    if relaxed:
        raise InputError("--relaxed", relaxed, "only --method respec can relax; the other methods are exact")
    if name in WITH_DRAFTER:
        from specrag.methods import baselines
        from specrag.methods.fallbacks import EAGLE_PREFIX, MODEL_PREFIX

        is_head = name == "eagle-2"
        prefix = EAGLE_PREFIX if is_head else MODEL_PREFIX
        if drafter is None or not drafter.startswith(prefix):
            remedy = f"--method {name} needs one: --drafter {prefix}NAME"
            raise InputError("--drafter", drafter, remedy)
        make = baselines.eagle if is_head else baselines.draft_model
        return make(drafter.removeprefix(prefix))
    if drafter is not None:
        raise InputError("--drafter", drafter, "only --method respec, draft-model and eagle-2 take one")
    return name


class SourceColours:
    """Colours a text as it comes by the source of its tokens.

    Args:
        stream: turns tokens into characters; this object's own.
    """

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
        self._styles: deque[str] = deque()  # one for each character that was decoded and not shown yet
        self._last = ""

    def paint(self, step: Step) -> Text:
        """The characters that a step shows; stop conditions may hold some back for a later one."""
        from rich.text import Text

        for token in step.tokens:
            self._last = _RELAXED if token.relaxed else _COLOURS.get(token.source, "")
            self._styles.extend([self._last] * len(self._stream.push(token.token)))
        text = Text()
        for character in step.text:
            text.append(character, style=self._styles.popleft() if self._styles else self._last)
        return text


def legend(usage: Usage) -> Text:
    """What each colour means, with the guesses of each source."""
    from rich.text import Text

    text = Text("sources: ")
    text.append(f"target {usage.completion_tokens - usage.accepted}")
    for source, drafted in sorted(usage.drafted_by.items()):
        accepted = usage.accepted_by.get(source, 0)
        text.append("  ")
        text.append(f"{source} {accepted} of {drafted}", style=_COLOURS.get(source, ""))
    if usage.relaxed:
        text.append("  ")
        text.append(f"relaxed {usage.relaxed}", style=_RELAXED)
    return text
