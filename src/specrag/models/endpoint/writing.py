"""Text generation by an endpoint: the calls for each request, and how their answers are combined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from specrag.engine import Coroutine, Emit, Search
from specrag.models.endpoint.answers import Completion, read_completion
from specrag.models.endpoint.connection import Connection
from specrag.models.endpoint.pool import Pool
from specrag.models.endpoint.prompts import Prompts
from specrag.models.roles import GeneratedText, TextDelta, TextDone, TextRequest, TextToken


def writing(
    connection: Connection | Pool,
    prompts: Prompts,
    requests: Sequence[TextRequest],
    clock: Callable[[], float],
    *,
    continued: bool,
) -> Coroutine[list[GeneratedText]]:
    """Write a text for each request, all concurrently; events as in :class:`~specrag.models.roles.TextGenerator`.

    A request with an answer format takes two calls, one per line: the second continues what the first wrote.

    Args:
        continued: the server can continue the beginning of an answer.
    """
    started = clock()
    first_lines: dict[int, Completion] = {}
    done: dict[int, GeneratedText] = {}

    def is_steered(request: TextRequest) -> bool:
        return request.answer_format is not None and (continued or not prompts.is_chat(request))

    calls = connection.begin(
        [
            prompts.generation(_first_line(request) if is_steered(request) else request, continued=continued)
            for request in requests
        ]
    )
    try:
        while len(done) < len(requests):
            answered = yield Search(calls.next, remote=True)
            number = answered.number
            request = requests[number]
            found = read_completion(answered.answer())
            if prompts.is_chat(request) and request.lead:
                # A server that does not continue the beginning of an answer may repeat it.
                found = without_lead(found, request.lead)
            if is_steered(request) and number not in first_lines:
                first_lines[number] = _cut(found)
                second = _second_line(request, first_lines[number])
                calls.add(number, connection.start(prompts.generation(second, continued=continued)))
                continue
            if number in first_lines:
                assert request.answer_format is not None
                found = join_lines(first_lines[number], request.answer_format.cue, found)
            done[number] = _generated(found, clock() - started)
            yield Emit(TextDelta(number, found.text))
            yield Emit(TextDone(number, done[number]))
    finally:
        calls.cancel()
    return [done[number] for number in range(len(requests))]


def without_lead(written: Completion, lead: str) -> Completion:
    """The text without the lead if the model has repeated it; any other text unchanged."""
    begin = written.text.find(lead)
    if not lead or begin < 0 or written.text[:begin].strip():
        return written
    cut = begin + len(lead)
    tokens, end = [], 0
    for token in written.tokens:
        start, end = end, end + len(token.text)
        if end > cut or (end == start and end >= cut):
            tokens.append(TextToken(token.text[max(cut - start, 0) :], token.log_prob))
    return replace(written, text=written.text[cut:], tokens=tuple(tokens))


def join_lines(first: Completion, cue: str, second: Completion) -> Completion:
    """A text in the rationale format. The model did not write the cue, so the cue has no log-probability."""
    told = None
    if first.prompt_tokens is not None and second.prompt_tokens is not None:
        told = first.prompt_tokens
    again = (second.prompt_tokens or 0) - second.cached_tokens
    return Completion(
        text=first.text + cue + second.text,
        tokens=(*first.tokens, TextToken(cue, None), *second.tokens),
        finish_reason=second.finish_reason,
        prompt_tokens=told,
        cached_tokens=first.cached_tokens - max(again, 0),
    )


def _first_line(request: TextRequest) -> TextRequest:
    assert request.answer_format is not None
    most = max(min(request.answer_format.within, request.max_tokens - 1), 1)
    return replace(request, max_tokens=most, stop=(*request.stop, "\n"))


def _second_line(request: TextRequest, first: Completion) -> TextRequest:
    assert request.answer_format is not None
    left = max(request.max_tokens - len(first.tokens), 1)
    begun = request.lead + first.text + request.answer_format.cue
    return replace(request, lead=begun, max_tokens=left, stop=(*request.stop, "\n"))


def _cut(line: Completion) -> Completion:
    """A line without the token that ended it and without trailing space."""
    text = line.text.rstrip()
    tokens, end = [], 0
    for token in line.tokens:
        start, end = end, end + len(token.text)
        if start < len(text):
            tokens.append(TextToken(token.text[: len(text) - start], token.log_prob))
    return replace(line, text=text, tokens=tuple(tokens))


def _generated(written: Completion, seconds: float) -> GeneratedText:
    tokens = written.prompt_tokens or 0
    return GeneratedText(
        text=written.text,
        tokens=written.tokens,
        finish_reason=written.finish_reason,
        prompt_tokens=tokens,
        read_tokens=max(tokens - written.cached_tokens, 0),
        passes=0,
        seconds=seconds,
    )
