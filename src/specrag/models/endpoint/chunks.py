"""Checked content of streamed and whole answers; an upstream may send anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specrag.engine import FinishReason
from specrag.models.endpoint.transport import CallError, Fault

#: Fields of a message, or of a piece of one, that are passed on.
_MESSAGE = ("role", "content", "refusal", "tool_calls", "reasoning_content", "reasoning")
#: Those that a reader can see.
_SHOWN = ("content", "refusal", "tool_calls", "reasoning_content", "reasoning")
_TEXTS = ("content", "refusal", "reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True)
class Piece:
    """One choice of a chunk, or of a whole answer.

    Attributes:
        index: index of the choice.
        text: the characters added to it.
        fields: ``delta``, ``message`` or ``text`` as received, without unknown fields.
        log_probs: the log-probabilities as received.
        finish_reason: why the choice has ended; ``None`` while it goes on.
    """

    index: int
    text: str
    fields: Mapping[str, Any]
    log_probs: Any
    finish_reason: str | None

    @property
    def is_content(self) -> bool:
        """Whether there is something to show, or the choice has ended."""
        delta = self.fields.get("delta", {})
        return bool(self.text or self.finish_reason or any(delta.get(name) for name in _SHOWN))


@dataclass(frozen=True, slots=True)
class Counted:
    """Token counts reported by an answer; ``None`` for those that it does not report."""

    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a stream, or a whole answer."""

    pieces: tuple[Piece, ...]
    counted: Counted | None

    @property
    def is_content(self) -> bool:
        """Whether some piece of it is content."""
        return any(piece.is_content for piece in self.pieces)


def read_chunk(event: object) -> Chunk:
    """Read a chunk or a whole answer.

    Raises:
        CallError: it has another form.
    """
    if not isinstance(event, Mapping) or not isinstance(event.get("choices"), list):
        raise _unusable("choices")
    usage = event.get("usage")
    pieces = tuple(_piece(number, choice) for number, choice in enumerate(event["choices"]))
    return Chunk(pieces, _counted(usage) if isinstance(usage, Mapping) else None)


def read_answer(answer: object, choices: int) -> Chunk:
    """Read a whole answer.

    Args:
        choices: number of choices that were asked for.

    Raises:
        CallError: it has another form, fewer choices, or one that has not ended.
    """
    chunk = read_chunk(answer)
    ended = {piece.index for piece in chunk.pieces if piece.finish_reason}
    if ended != set(range(choices)):
        raise _unusable(f"{choices} choices that have ended")
    return chunk


def as_finish_reason(reason: str | None) -> FinishReason:
    """The finish reason as our results name it."""
    return "length" if reason == "length" else "stop"


def _piece(number: int, choice: object) -> Piece:
    if not isinstance(choice, Mapping):
        raise _unusable("choices that are objects")
    index, reason = choice.get("index", number), choice.get("finish_reason")
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < 256:
        raise _unusable("choices with an index")
    if reason is not None and not isinstance(reason, str):
        raise _unusable("a finish_reason that is a text")
    fields: dict[str, Any] = {}
    for name in ("delta", "message"):
        if name in choice:
            fields[name] = _message(choice[name])
    said = choice.get("text") if not fields else next(iter(fields.values())).get("content")
    if not isinstance(said, str | None):
        raise _unusable("a text")
    if not fields:
        fields["text"] = said or ""
    return Piece(index, said or "", fields, choice.get("logprobs"), reason)


def _message(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _unusable("messages that are objects")
    kept = {name: value[name] for name in _MESSAGE if name in value}
    for name in _TEXTS:
        if not isinstance(kept.get(name), str | None):
            raise _unusable(f"a {name} that is a text")
    calls = kept.get("tool_calls")
    if calls is not None and not _are_calls(calls):
        raise _unusable("tool_calls that are objects")
    return kept


def _are_calls(value: object) -> bool:
    return isinstance(value, Sequence) and all(isinstance(call, Mapping) for call in value)


def _counted(usage: Mapping[str, Any]) -> Counted:
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    return Counted(_count(usage.get("prompt_tokens")), _count(cached), _count(usage.get("completion_tokens")))


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _unusable(wanted: str) -> CallError:
    return CallError(Fault.BROKEN, f"its answer cannot be used: it should hold {wanted}")
