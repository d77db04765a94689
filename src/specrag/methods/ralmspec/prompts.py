"""The prompts and queries of iterative retrieval (Ram et al. 2023, "In-Context Retrieval-Augmented Language Models").

One passage stands in front of the question and is replaced at every retrieval; the query is the end of the text so far.
Both are functions of the question and the generated tokens, so any way to reach the same tokens asks the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from specrag.errors import ContextLengthError, InputError
from specrag.models import Tokenizer
from specrag.retrieval import Passage, passage_text

if TYPE_CHECKING:
    from specrag.methods.ralmspec import Iterative

#: If the prompt has room for fewer tokens of a passage than this, the passage is useless.
FEWEST_PASSAGE_TOKENS = 16


def id_of(passage: Passage | None) -> int | None:
    """A passage's id; ``None`` if there is no passage."""
    return None if passage is None else passage.id


class TokenModel(Protocol):
    """A model whose tokens are known here, local or behind endpoints."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of prompt and output together."""


class PassagePrompts:
    """The prompts of one question, one for each passage.

    If the model has a chat template, passage and question are the user's message and the output follows
    the template's end; other models continue the bare text.

    Args:
        llm: whose tokens and template are used.
        question: in words.
        reading: how much to read: the options ``query_tokens``, ``passage_tokens`` and ``prompt_tokens``.
        max_tokens: maximum tokens of the output, which the model's context must hold too.
        system: a system message in front.
        raw: use the bare text in any case.

    Raises:
        ContextLengthError: the question leaves no room for a passage.
    """

    def __init__(
        self,
        llm: TokenModel,
        question: str,
        reading: Iterative.Options,
        max_tokens: int,
        *,
        system: str | None = None,
        raw: bool = False,
    ) -> None:
        self._tokenizer = llm.tokenizer
        self._question = question
        self._reading = reading
        self._system = system
        self._chat = not raw and self._tokenizer.has_chat_template
        if system is not None and not self._chat:
            raise InputError("system", system, "leave it out; this model gets a bare text without roles")
        # A chat model writes a new paragraph; other models continue the question's line.
        self._asked = self._tokenizer.encode(f"{question}\n" if self._chat else question, special=False)
        self._room = min(reading.prompt_tokens, llm.context_length - max_tokens)
        self._known: dict[int | None, list[int]] = {}
        self._check_room()

    def tokens(self, passage: Passage | None) -> list[int]:
        """The prompt with this passage, or with none; do not change it."""
        key = id_of(passage)
        if key not in self._known:
            self._known[key] = self._build("") if passage is None else self._fit(passage)
        return self._known[key]

    def query(self, generated: Sequence[int]) -> str:
        """The search text after these output tokens: the end of the text, never blank."""
        whole = [*self._asked, *generated]
        window = self._tokenizer.decode(whole[-self._reading.query_tokens :]).strip()
        return window or self._tokenizer.decode(whole).strip() or self._question

    def _fit(self, passage: Passage) -> list[int]:
        text = passage_text(passage.title, passage.text)
        words = self._tokenizer.encode(text, special=False)[: self._reading.passage_tokens]
        while True:
            # The cut may leave part of a character at the end.
            kept = self._tokenizer.decode(words).rstrip("\ufffd").strip()
            tokens = self._build(kept)
            over = len(tokens) - self._room
            if over <= 0 or not words:
                return tokens
            words = words[: max(len(words) - over, 0)]

    def _build(self, passage: str) -> list[int]:
        content = f"{passage}\n\n{self._question}" if passage else self._question
        if not self._chat:
            return self._tokenizer.encode(content, special=True)
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return self._tokenizer.chat([*system, {"role": "user", "content": content}])

    def _check_room(self) -> None:
        bare = len(self.tokens(None))
        if bare + FEWEST_PASSAGE_TOKENS > self._room:
            remedy = (
                f"the prompt has {bare:,} tokens before any passage and room for {max(self._room, 0):,}; "
                "shorten the question, ask for fewer tokens or raise prompt_tokens"
            )
            raise ContextLengthError("question", self._question, remedy)
