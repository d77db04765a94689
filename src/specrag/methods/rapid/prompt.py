"""The prompts about a long context: everything for the target, the part for the drafter, the document always first.

What does not change between two questions comes first, so that its keys and values serve the second one too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from specrag.methods.prompts import Message, as_text
from specrag.retrieval.documents import ContextChunk, Document

if TYPE_CHECKING:
    from specrag.models import Tokenizer

#: Instruction between the documents and the question. Of six wordings, this is the one with which SmolLM2-135M most
#: often answered from a text of thousands of tokens; small models follow what they read last.
INSTRUCTION = "Use the text above to answer in a few sentences."

#: Marks where the middle of a context was left out.
GAP = "[...]"


@dataclass(frozen=True, slots=True)
class ContextQuestion:
    """The question and the short texts around it.

    Args:
        question: in words.
        history: earlier messages about the documents; empty if the conversation itself is the long context.
        system: a system message in front.
        instruction: placed between the documents and the question.
    """

    question: str
    history: tuple[Message, ...] = ()
    system: str | None = None
    instruction: str = INSTRUCTION

    def about_text(self, text: str) -> tuple[Message, ...]:
        """The conversation with a text in front of its first message."""
        messages: list[Message] = []
        lead = f"{text}\n\n{self.instruction} "
        turns = [*self.history, {"role": "user", "content": self.question}]
        if turns[0]["role"] == "user":
            messages.append({"role": "user", "content": lead + turns[0]["content"]})
            turns = turns[1:]
        else:
            messages.append({"role": "user", "content": f"{text}\n\n{self.instruction}"})
        return self._with_system([*messages, *turns])

    def after(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """An unchanged conversation, followed by the question."""
        return self._with_system([*messages, {"role": "user", "content": self.question}])

    def after_part(self, chunks: Sequence[ContextChunk]) -> tuple[Message, ...]:
        """Some stretches of a conversation and the question, with alternating speakers as chat templates require."""
        spoken = [message for chunk in chunks for message in chunk.messages]
        spoken.append({"role": "user", "content": self.question})
        turns: list[Message] = [
            {"role": role, "content": "\n\n".join(message["content"] for message in same)}
            for role, same in groupby(spoken, key=lambda message: message["role"])
        ]
        if turns[0]["role"] != "user":
            turns.insert(0, {"role": "user", "content": GAP})
        return self._with_system(turns)

    def _with_system(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        head: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        return (*head, *messages)


def whole_text(documents: Sequence[Document]) -> str:
    """All documents, word for word; if there are several, each under its title."""
    several = len(documents) > 1
    return "\n\n".join(
        _headed(document.title, [part.text for part in document.parts], several) for document in documents
    )


def text_of(chunks: Sequence[ContextChunk], *, several: bool) -> str:
    """Some chunks in document order, in the same form.

    Args:
        several: whether the context has several documents.
    """
    texts = []
    for _, same in groupby(chunks, key=lambda chunk: chunk.document):
        group = list(same)
        texts.append(_headed(group[0].title, [chunk.text for chunk in group], several))
    return "\n\n".join(texts)


def text_without_middle(head: Sequence[ContextChunk], tail: Sequence[ContextChunk], *, several: bool) -> str:
    """The beginning and the end of the documents, with a mark between them."""
    return f"\n\n{GAP}\n\n".join(text_of(chunks, several=several) for chunks in (head, tail) if chunks)


def encode(tokenizer: Tokenizer, messages: Sequence[Message], *, raw: bool = False) -> list[int]:
    """The conversation in the model's chat template, or as text if it has none or ``raw`` asks for it."""
    if tokenizer.has_chat_template and not raw:
        return tokenizer.chat(messages)
    return tokenizer.encode(as_text(messages), special=True)


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the common beginning of two prompts, in tokens."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(first), len(second)))


def _headed(title: str, texts: Sequence[str], several: bool) -> str:
    body = "\n\n".join(text.strip() for text in texts)
    return f"# {title}\n\n{body}" if several and title else body
