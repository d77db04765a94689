"""Strict parsing of an endpoint's answers: generated texts, and log-probabilities of given texts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from specrag.engine import FinishReason
from specrag.errors import EndpointUnavailable
from specrag.models.roles import TextToken

#: Stands for the bytes of an incomplete character.
_REPLACEMENT = "\ufffd"


class NoLogProbs(EndpointUnavailable):
    """An answer lacks the requested log-probabilities."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A token as an endpoint reports it.

    Attributes:
        text: its characters; the bytes of an incomplete character are U+FFFD.
        log_prob: in nats; ``None`` for the first token of a text.
    """

    text: str
    log_prob: float | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A generated text.

    Attributes:
        prompt_tokens: number of tokens of the prompt; ``None`` if the endpoint does not tell.
        cached_tokens: prompt tokens found in the endpoint's cache.
    """

    text: str
    tokens: tuple[TextToken, ...]
    finish_reason: FinishReason
    prompt_tokens: int | None
    cached_tokens: int


def read_completion(answer: object) -> Completion:
    """Read a completion or a chat completion.

    Raises:
        EndpointUnavailable: the answer has another form.
    """
    choice = _choice(answer)
    chat = "message" in choice
    text = _mapping(choice["message"]).get("content") if chat else choice.get("text")
    if text is None and chat:
        text = ""  # a chat answer that ended at once
    if not isinstance(text, str):
        raise _unusable("a text")
    pieces = _chat_pieces(choice) if chat else _completion_pieces(choice)
    usage = _usage(answer)
    cached = usage.get("prompt_tokens_details")
    return Completion(
        text=text,
        tokens=_tokens(text, pieces),
        finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
        prompt_tokens=_count(usage.get("prompt_tokens")),
        cached_tokens=(_count(_mapping(cached).get("cached_tokens")) or 0) if cached else 0,
    )


def read_prompt_log_probs(answer: object, tokens: Sequence[int] | None) -> list[Piece]:
    """Read vLLM's ``prompt_logprobs``, from a completion's choice or, for a chat, from next to the choices.

    Args:
        tokens: the tokens that were sent, if they are known.

    Raises:
        NoLogProbs: there are none.
    """
    choice = _choice(answer)
    entries = choice.get("prompt_logprobs") or _mapping(answer).get("prompt_logprobs")
    if not isinstance(entries, list) or not entries:
        raise NoLogProbs("the endpoint answers without the log-probabilities of its prompt")
    if tokens is not None and len(entries) != len(tokens):
        raise _unusable(f"log-probabilities for {len(tokens)} tokens, not for {len(entries)}")
    pieces = []
    for number, entry in enumerate(entries):
        if entry is None:  # the first token follows nothing
            pieces.append(Piece("", None))
            continue
        entry = _mapping(entry)
        # The token itself comes first; alternatives may follow.
        key = next(iter(entry), "") if tokens is None else str(tokens[number])
        if key not in entry:
            raise _unusable("the log-probability of every token of the prompt")
        found = _mapping(entry[key])
        pieces.append(Piece(str(found.get("decoded_token") or ""), _log_prob(found.get("logprob"))))
    return pieces


def read_echo(answer: object, tokens: Sequence[int] | None, text: str | None, generated: int) -> list[Piece]:
    """Read the result of ``echo`` with ``logprobs``.

    Args:
        tokens: the tokens that were sent, if they are known.
        text: the text that was sent, if it was a text.
        generated: how many tokens after the prompt were asked for; they are left out.

    Raises:
        NoLogProbs: there are none, or only those of generated tokens.
    """
    pieces = _completion_pieces(_choice(answer))
    if pieces and generated:
        pieces = pieces[:-generated]
    joined = "".join(piece.text for piece in pieces)
    short = len(joined) < len(text) / 2 if text is not None else tokens is not None and not joined
    if not pieces or short or any(piece.log_prob is None for piece in pieces[1:]):
        raise NoLogProbs("the endpoint answers without the log-probabilities of its prompt")
    if tokens is not None and len(pieces) != len(tokens):
        raise NoLogProbs(f"the endpoint tells of {len(pieces)} tokens where {len(tokens)} were sent")
    return pieces


def prompt_tokens(answer: object) -> int | None:
    """Number of tokens of the prompt; ``None`` if the endpoint does not tell."""
    return _count(_usage(answer).get("prompt_tokens"))


def token_starts(pieces: Sequence[str], text: str) -> list[int]:
    """Where each piece starts in ``text``, which the joined pieces end with; negative if it starts before the text.

    A character of several tokens arrives as pieces that contain U+FFFD: they start somewhere in a run of such pieces,
    the first of them at the run's beginning.

    Raises:
        EndpointUnavailable: the pieces do not spell the text.
    """
    joined = "".join(pieces)
    # vLLM does not report the first token of a prompt, since it has no log-probability.
    if joined.endswith(text) or (pieces and not pieces[0] and text.endswith(joined)):
        ends = accumulate((len(piece) for piece in pieces), initial=len(text) - len(joined))
        return [*(end if number else min(end, 0) for number, end in enumerate(ends))][:-1]
    starts = [0] * len(pieces)
    position = len(text)  # of the first character that has been placed
    run: list[str] = []  # pieces of unknown length directly before it
    for number in range(len(pieces) - 1, -1, -1):
        piece = pieces[number]
        if position <= 0 and not run:
            starts[number] = position = position - max(len(piece), 1)
        elif not piece or _REPLACEMENT in piece:
            run.insert(0, piece)
        else:
            end = _end_in_front(text, position, piece, run)
            starts[number + 1 : number + 1 + len(run)] = _places_in_run(text, end, run)
            run = []
            starts[number] = position = end - len(piece)
    starts[: len(run)] = _places_in_run(text, 0, run)
    return starts


def _end_in_front(text: str, position: int, piece: str, run: Sequence[str]) -> int:
    """Where a known piece ends that comes before a run of unknown ones, which ends at ``position``."""
    if not any(run):
        ends = [position]
    else:
        head = run[0].split(_REPLACEMENT)[0]
        known = set("".join(run))
        reach = position
        while reach and (ord(text[reach - 1]) >= 128 or text[reach - 1] in known):
            reach -= 1
        ends = [end for end in range(position - 1, reach - 1, -1) if text.startswith(head, end)]
    for end in ends:
        if text.endswith(piece, 0, end) or piece.endswith(text[:end]):
            return end
    raise _unusable("tokens that spell its prompt; name a tokenizer, so that token ids are sent")


def _places_in_run(text: str, start: int, run: Sequence[str]) -> list[int]:
    """Where the pieces of a run start: found by their first characters, else right after those of the piece before."""
    found = []
    for piece in run:
        head = piece.split(_REPLACEMENT)[0]
        place = text.find(head, start) if head else start
        start = max(place, start)
        found.append(start)
        start += len(head)
    return found


def _tokens(text: str, pieces: Sequence[Piece]) -> tuple[TextToken, ...]:
    """Tokens whose texts, joined, begin with the text."""
    if not pieces:
        return (TextToken(text, None),)
    ends = list(accumulate(len(piece.text) for piece in pieces))
    if "".join(piece.text for piece in pieces).startswith(text):
        tokens = [TextToken(piece.text, piece.log_prob) for piece in pieces]
        if len(ends) > 1 and ends[-2] == len(text):
            tokens[-1] = TextToken("", pieces[-1].log_prob)  # the end token
        return tuple(tokens)
    try:
        starts = token_starts([piece.text for piece in pieces], text)
    except EndpointUnavailable:
        return (TextToken(text, None),)
    borders = [max(start, 0) for start in starts]
    ends = [*borders[1:], len(text)]
    return tuple(
        TextToken(text[start:end], piece.log_prob)
        for piece, start, end in zip(pieces, borders, ends, strict=True)
    )


def _completion_pieces(choice: Mapping[str, Any]) -> list[Piece]:
    found = choice.get("logprobs")
    if not isinstance(found, Mapping):
        return []
    texts, values = found.get("tokens"), found.get("token_logprobs")
    if not isinstance(texts, list) or not isinstance(values, list) or len(texts) != len(values):
        return []
    return [
        Piece(str(text), None if value is None else _log_prob(value))
        for text, value in zip(texts, values, strict=True)
    ]


def _chat_pieces(choice: Mapping[str, Any]) -> list[Piece]:
    found = choice.get("logprobs")
    entries = found.get("content") if isinstance(found, Mapping) else None
    if not isinstance(entries, list):
        return []
    return [Piece(str(_mapping(e).get("token", "")), _log_prob(_mapping(e).get("logprob"))) for e in entries]


def _choice(answer: object) -> Mapping[str, Any]:
    choices = _mapping(answer).get("choices")
    if not isinstance(choices, list) or not choices:
        raise _unusable("choices")
    return _mapping(choices[0])


def _usage(answer: object) -> Mapping[str, Any]:
    usage = _mapping(answer).get("usage")
    return usage if isinstance(usage, Mapping) else {}


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _unusable("a JSON object")
    return value


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _log_prob(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value > 1e-3:
        raise _unusable("log-probabilities of at most 0")
    return min(float(value), 0.0)


def _unusable(wanted: str) -> EndpointUnavailable:
    return EndpointUnavailable(f"the endpoint's answer cannot be used: it should hold {wanted}")
