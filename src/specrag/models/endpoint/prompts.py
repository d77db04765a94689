"""Prompts in the form that an endpoint takes: token ids if its tokenizer is available, else a text or messages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from specrag.models.endpoint.answers import Piece, token_starts
from specrag.models.endpoint.connection import Call
from specrag.models.roles import ScoringRequest, TextPrompt, TextRequest
from specrag.models.tokenizer import encode_text, place_text

if TYPE_CHECKING:
    from specrag.models.tokenizer import Tokenizer

#: What is sent: token ids or a text to ``/completions``, or messages to ``/chat/completions``.
PromptForm: TypeAlias = Literal["tokens", "text", "messages"]

#: How given text is scored. ``prompt``: ``prompt_logprobs`` (vLLM). ``echo``: ``echo`` with ``logprobs``, generating
#: nothing; ``echo-one``: the same for servers that insist on generating one token.
ScoringMode: TypeAlias = Literal["prompt", "echo", "echo-one"]

#: Scoring modes to try for each form, the simplest first.
SCORING_MODES: Mapping[PromptForm, tuple[ScoringMode, ...]] = {
    "tokens": ("prompt", "echo", "echo-one"),
    "text": ("prompt", "echo", "echo-one"),
    "messages": ("prompt",),
}

_COMPLETIONS, _CHAT = "/completions", "/chat/completions"

# Estimates on the high side: English has four bytes per token, Chinese three or four.
_BYTES_A_TOKEN = 3
_TOKENS_A_MESSAGE = 8


@dataclass(frozen=True, slots=True)
class ScoringCall:
    """A text to score, in the form in which it is sent.

    Attributes:
        call: what to send.
        tokens: the token ids in it, if it contains any.
        text: the text that the server's tokens end with: all of it, or the parts of a conversation.
        starts: where each token starts, if the tokens are known.
        borders: where each part starts, in the same text.
    """

    call: Call
    tokens: Sequence[int] | None
    text: str
    starts: Sequence[int] | None
    borders: Sequence[int]

    def starts_of(self, pieces: Sequence[Piece]) -> Sequence[int]:
        """Where each token of the answer starts.

        Raises:
            EndpointUnavailable: they do not spell the text.
        """
        return (
            token_starts([piece.text for piece in pieces], self.text) if self.starts is None else self.starts
        )


class Prompts:
    """Turns requests into calls.

    Args:
        model: the endpoint's name for the model.
        tokenizer: the endpoint's tokenizer, if it is available here.
    """

    def __init__(self, model: str, tokenizer: Tokenizer | None) -> None:
        self._model = model
        self._tokenizer = tokenizer

    def form(self, prompt: TextPrompt) -> PromptForm:
        """How a prompt is sent."""
        if self._tokenizer is not None:
            return "tokens"
        return "text" if isinstance(prompt, str) else "messages"

    @property
    def forms(self) -> tuple[PromptForm, ...]:
        """All forms that prompts may take with this endpoint."""
        return ("tokens",) if self._tokenizer is not None else ("text", "messages")

    @property
    def counts_exactly(self) -> bool:
        """Whether :meth:`count` is exact, not an estimate."""
        return self._tokenizer is not None

    def count(self, prompt: TextPrompt, lead: str) -> int:
        """Number of tokens of a prompt, exact or estimated on the high side."""
        if self._tokenizer is not None:
            return len(encode_text(self._tokenizer, prompt, lead))
        texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
        size = sum(len(text.encode("utf-8", "replace")) for text in (*texts, lead))
        return math.ceil(size / _BYTES_A_TOKEN) + _TOKENS_A_MESSAGE * (len(texts) + 1)

    def is_chat(self, request: TextRequest) -> bool:
        """Whether it is the server that must continue the beginning of an answer, if there is one."""
        return self.form(request.prompt) == "messages"

    def generation(self, request: TextRequest, *, continued: bool = True) -> Call:
        """The call that writes a text.

        Args:
            continued: the server can continue the beginning of an answer; if not, and if :meth:`is_chat`, the beginning
                is left out and it is up to the model to begin that way.
        """
        body: dict[str, object] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
        }
        if request.stop:
            body["stop"] = list(request.stop)
        prompt = request.prompt
        if self._tokenizer is not None:
            tokens = encode_text(self._tokenizer, prompt, request.lead)
            return Call(_COMPLETIONS, {**body, "prompt": tokens, "logprobs": 1})
        if isinstance(prompt, str):
            return Call(_COMPLETIONS, {**body, "prompt": prompt + request.lead, "logprobs": 1})
        lead = request.lead if continued else ""
        return Call(_CHAT, {**body, **_conversation(prompt, lead), "logprobs": True})

    def scoring(self, request: ScoringRequest, way: ScoringMode) -> ScoringCall:
        """The call that scores a text."""
        parts = [part.text for part in request.parts]
        prompt = request.prompt
        if self._tokenizer is not None:
            placed = place_text(self._tokenizer, prompt, parts)
            body = {"prompt": list(placed.tokens), **_asking(way)}
            return ScoringCall(
                self._call(_COMPLETIONS, body), placed.tokens, "", placed.starts, placed.borders
            )
        if isinstance(prompt, str):
            text = prompt + "".join(parts)
            borders = _borders(parts, len(prompt))
            return ScoringCall(
                self._call(_COMPLETIONS, {"prompt": text, **_asking(way)}), None, text, None, borders
            )
        text = "".join(parts)
        body = {**_conversation(prompt, text), **_asking(way)}
        return ScoringCall(self._call(_CHAT, body), None, text, None, _borders(parts, 0))

    def _call(self, path: str, body: Mapping[str, object]) -> Call:
        return Call(path, {"model": self._model, "temperature": 0.0, **body})


def _asking(way: ScoringMode) -> dict[str, object]:
    if way == "prompt":
        return {"prompt_logprobs": 0, "max_tokens": 1}
    return {"echo": True, "logprobs": 1, "max_tokens": 0 if way == "echo" else 1}


def _conversation(messages: Sequence[Mapping[str, str]], begun: str) -> dict[str, object]:
    """Messages for the server's template, with the beginning of the answer if there is one."""
    if not begun:
        return {"messages": [dict(message) for message in messages]}
    # The form that vLLM and SGLang take. Servers that do not know the two flags answer as to a finished turn.
    said = {"role": "assistant", "content": begun}
    return {
        "messages": [*(dict(message) for message in messages), said],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }


def _borders(parts: Sequence[str], start: int) -> list[int]:
    borders = []
    for part in parts:
        borders.append(start)
        start += len(part)
    return borders
