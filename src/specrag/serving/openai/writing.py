"""What answers of both text-writing routes have in common: their heads, their usage, the field ``specrag``."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from specrag.request import Result
from specrag.serving.openai.answering import Answering
from specrag.serving.openai.logprobs import TokenNames
from specrag.serving.openai.schemas import GenerationBody


class AnswerWriter:
    """Puts a request's texts into OpenAI's form.

    Args:
        body: the request's.
        answering: runs its texts.
        prefix: the beginning of the answer's id.
        objects: the ``object`` field of the whole answer and of a chunk.
    """

    def __init__(
        self, body: GenerationBody, answering: Answering, prefix: str, objects: tuple[str, str]
    ) -> None:
        tokenizer = answering.tokenizer
        self.answering = answering
        self.names = TokenNames(tokenizer)
        #: Tokens that end a text and are not part of it.
        self.ends: frozenset[int] = frozenset() if tokenizer is None else tokenizer.eos_tokens
        self._choices = body.n or 1
        self._counted = body.stream_options is not None and body.stream_options.include_usage
        self._asked = body.specrag is not None
        self._extension = body.extension
        self._objects = objects
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": answering.fingerprint,
        }

    def whole_of(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The answer in one piece."""
        return {
            **self._head,
            "object": self._objects[0],
            "choices": choices,
            "usage": add_up(self.answering.finished, self._choices),
            "specrag": self.answering.summary(),
        }

    def chunk_of(self, choice: dict[str, Any], event: dict[str, Any] | None) -> dict[str, Any]:
        """A chunk of the answer, with an event of ours if there is one."""
        chunk = {**self._head, "object": self._objects[1], "choices": [choice]}
        if self._counted:
            chunk["usage"] = None
        return chunk if event is None else {**chunk, "specrag": event}

    def usage_chunks(self) -> list[dict[str, Any]]:
        """The last chunk, with the counts of tokens, if it was asked for."""
        if not self._counted:
            return []
        usage = add_up(self.answering.finished, self._choices)
        return [{**self._head, "object": self._objects[1], "choices": [], "usage": usage}]

    def done(self, index: int) -> dict[str, Any] | None:
        """The event at the end of a text, if the request uses the field ``specrag``."""
        return {"event": "done", **self.answering.describe(index)} if self._asked else None

    @property
    def tells_events(self) -> bool:
        """Whether the request asks for events."""
        return self._extension.events


def add_up(results: Sequence[Result], choices: int) -> dict[str, Any]:
    """OpenAI's counts over all texts; a prompt that several choices answer is counted once.

    Args:
        choices: how many each prompt has; those of a prompt are adjacent.
    """
    prompts = [result.usage for result in results[::choices]]
    prompt = sum(usage.prompt_tokens for usage in prompts)
    written = sum(result.usage.completion_tokens for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {
            "cached_tokens": sum(usage.cached_tokens for usage in prompts),
            "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
