"""Texts and conversations as the tokens that a local model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specrag.models.roles import TextPrompt

if TYPE_CHECKING:
    from specrag.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PlacedText:
    """A prompt with parts behind it, tokenised as a whole.

    Attributes:
        tokens: ids.
        starts: the character with which each token starts.
        borders: the character with which each part starts.
    """

    tokens: Sequence[int]
    starts: Sequence[int]
    borders: Sequence[int]


def encode_text(tokenizer: Tokenizer, prompt: TextPrompt, lead: str = "") -> list[int]:
    """The tokens of a prompt and of the answer's beginning.

    Raises:
        InputError: the chat template refuses the messages.
    """
    return list(place_text(tokenizer, prompt, (lead,)).tokens)


def place_text(tokenizer: Tokenizer, prompt: TextPrompt, parts: Sequence[str]) -> PlacedText:
    """The tokens of a prompt with parts behind it, and where everything starts.

    Raises:
        InputError: the chat template refuses the messages.
    """
    templated = False
    if isinstance(prompt, str):
        text = prompt
    elif tokenizer.has_chat_template:
        text, templated = tokenizer.chat_text(prompt), True
    else:
        text = plain_text(prompt)
    borders = []
    for part in parts:
        borders.append(len(text))
        text += part
    # A template writes the tokens that stand in front of every text itself.
    placed = tokenizer.encode_with_starts(_clean(text), special=not templated)
    return PlacedText(placed.tokens, placed.starts, borders)


def plain_text(messages: Sequence[Mapping[str, str]]) -> str:
    """A conversation for a model without a chat template."""
    return "\n\n".join(message["content"] for message in messages) + "\n"


def _clean(text: str) -> str:
    # Half a surrogate pair, as damaged JSON has it, is no text that a tokenizer takes; one character for one.
    return text.encode("utf-8", "replace").decode("utf-8")
