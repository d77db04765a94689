"""A conversation as the tokens that a model reads, with or without a chat template, and with the answer's beginning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrag.errors import InputError
from specrag.methods.generation import Generator
from specrag.methods.options import Options
from specrag.methods.rag_prompt import Message, as_text


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """What the model reads, and the options that go with it."""

    tokens: Sequence[int]
    options: Options


def encode_prompt(
    llm: Generator, messages: Sequence[Message], options: Options, lead: str = ""
) -> EncodedPrompt:
    """The conversation in the model's chat template, or as a text where it has none.

    Args:
        options: of the generation; ``raw`` asks for the text.
        lead: how the answer begins.
    """
    if not options.get("raw") and _has_chat_template(llm):
        return EncodedPrompt([*llm.encode(messages), *_continuation(llm, lead)], options)
    # Without end-of-turn tokens such a model would go on with a next question of its own.
    plain: Options = {"stop": "\n", **options}
    return EncodedPrompt(llm.encode(as_text(messages, lead), raw=True), plain)


def _has_chat_template(llm: Generator) -> bool:
    try:
        llm.encode([{"role": "user", "content": "?"}])
    except InputError:
        return False
    return True


def _continuation(llm: Generator, text: str) -> list[int]:
    """The tokens of a text inside another, without those that the model expects in front of every text."""
    if not text:
        return []
    tokens = llm.encode(text, raw=True)
    other = llm.encode("0" if text[0] != "0" else "1", raw=True)
    shared = next((place for place, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), 0)
    return tokens[shared:]
