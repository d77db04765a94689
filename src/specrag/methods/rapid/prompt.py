"""The prompts about a long context: everything for the target, the part for the drafter, the document always first.

What does not change between two questions stands in front, so that its keys and values serve the second one too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from specrag.methods.prompts import Message, as_text
from specrag.retrieval.documents.contexts import ContextChunk
from specrag.retrieval.documents.reader import Document

if TYPE_CHECKING:
    from specrag.models.tokenizer import Tokenizer

#: What the model is told between the documents and the question. Of six wordings, the one with which SmolLM2-135M
#: answered from a text of thousands of tokens most often; small models follow what they read last.
INSTRUCTION = "Use the text above to answer in a few sentences."

#: Stands where the middle of a context was left out.
GAP = "[...]"


@dataclass(frozen=True, slots=True)
class ContextQuestion:
    """What is asked, and what is not long about it.

    Args:
        question: in words.
        history: earlier messages about the documents; empty where the conversation itself is the long context.
        system: a system message in front.
        instruction: between the documents and the question.
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
        """The question behind a conversation, which is as it was."""
        return self._with_system([*messages, {"role": "user", "content": self.question}])

    def after_part(self, chunks: Sequence[ContextChunk]) -> tuple[Message, ...]:
        """The question behind some stretches of a conversation, speakers in turns as chat templates want them."""
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
    """All documents, word for word; several of them under their titles."""
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
    """The beginning and the end of the documents, and a mark between them."""
    return f"\n\n{GAP}\n\n".join(text_of(chunks, several=several) for chunks in (head, tail) if chunks)


def encode(tokenizer: Tokenizer, messages: Sequence[Message], *, raw: bool = False) -> list[int]:
    """The conversation in the model's chat template, or as a text where it has none or ``raw`` asks for it."""
    if tokenizer.has_chat_template and not raw:
        return tokenizer.chat(messages)
    return tokenizer.encode(as_text(messages), special=True)


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two prompts begin with alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(first), len(second)))


def _headed(title: str, texts: Sequence[str], several: bool) -> str:
    body = "\n\n".join(text.strip() for text in texts)
    return f"# {title}\n\n{body}" if several and title else body
