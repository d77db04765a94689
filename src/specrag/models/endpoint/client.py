"""An OpenAI-compatible endpoint (vLLM, ``specrag serve``, any other) as a text generator and scorer.

It has no sessions and exposes no logits, so token-level methods cannot use it, but it can be the drafter or the
verifier of Speculative RAG. ``docs/endpoints.md`` says which servers can score.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

from specrag.engine import Coroutine, Search
from specrag.errors import ContextLengthError, EndpointUnavailable, InputError, UpstreamError
from specrag.models.endpoint.answers import (
    NoLogProbs,
    Piece,
    prompt_tokens,
    read_echo,
    read_prompt_log_probs,
)
from specrag.models.endpoint.connection import Call, Connection, EndpointSettings, Refused
from specrag.models.endpoint.pool import Pool
from specrag.models.endpoint.prompts import SCORING_MODES, PromptForm, Prompts, ScoringCall, ScoringMode
from specrag.models.endpoint.writing import writing
from specrag.models.roles import (
    GeneratedText,
    PartScore,
    ScoredText,
    ScoringRequest,
    TextPart,
    TextPrompt,
    TextRequest,
    assign,
)
from specrag.models.tokenizer import Tokenizer

_PROBE = "Two and two are"
_PROBED_PART = TextPart("answer", " four")


class Endpoint:
    """A model behind an address. Made by :func:`open_endpoint`; safe from any thread.

    It is a :class:`~specrag.models.roles.TextGenerator` and, where the server can score, a
    :class:`~specrag.models.roles.TextScorer`.

    Args:
        url: the address, up to and including ``/v1``.
        model: the endpoint's name for the model.
        settings: how to talk to it.
        tokenizer: the endpoint's tokenizer, if it is available here.
        connection: makes the calls; by default a connection to ``url``.
        clock: returns seconds.
    """

    def __init__(
        self,
        url: str,
        model: str,
        settings: EndpointSettings,
        tokenizer: Tokenizer | None = None,
        *,
        connection: Connection | Pool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.url = url
        self.model = model
        self.settings = settings
        self._connection = connection or Connection(url, settings)
        self._prompts = Prompts(model, tokenizer)
        self._clock = clock
        self._context_length = settings.context_length
        self._ways: dict[PromptForm, ScoringMode] = {}
        self._continues = True
        self._probing = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The address with the model's name."""
        return f"{self.url}#{self.model}"

    @property
    def context_length(self) -> int | None:
        """Context length according to the settings or the endpoint; ``None`` if neither says."""
        return self._context_length

    def close(self) -> None:
        """End what is under way and close the connections."""
        self._connection.close()

    def connect(self) -> None:
        """Check that the endpoint answers and serves the model, and learn its context length. May block.

        Raises:
            EndpointUnavailable: it does not answer.
            InputError: it does not serve the model.
        """
        try:
            answer = self._connection.ask(Call("/models"))
        except Refused:
            return  # some endpoints list nothing
        entries = answer.get("data") if isinstance(answer, Mapping) else None
        known = [entry for entry in entries or () if isinstance(entry, Mapping)]
        mine = next((entry for entry in known if entry.get("id") == self.model), None)
        if known and mine is None:
            names = ", ".join(str(entry.get("id")) for entry in known[:8])
            raise InputError("model", self.model, f"{self.url} serves {names}")
        length = mine.get("max_model_len") if mine is not None else None
        if self._context_length is None and isinstance(length, int):
            self._context_length = length

    def count(self, prompt: TextPrompt, lead: str = "") -> int:
        return self._prompts.count(prompt, lead)

    # -- writing --------------------------------------------------------------------------------------------

    def generating(self, requests: Sequence[TextRequest]) -> Coroutine[list[GeneratedText]]:
        """Texts written by the endpoint. Each arrives as a whole; an answer format takes two calls, one per line."""
        return self._generating([self._fitted(request) for request in requests])

    def _generating(self, requests: Sequence[TextRequest]) -> Coroutine[list[GeneratedText]]:
        if self._continues and any(self._prompts.is_chat(request) for request in requests):
            try:
                return (yield from self._writing(requests))
            except Refused:
                self._continues = False
        return (yield from self._writing(requests))

    def _writing(self, requests: Sequence[TextRequest]) -> Coroutine[list[GeneratedText]]:
        return writing(self._connection, self._prompts, requests, self._clock, continued=self._continues)

    # -- scoring --------------------------------------------------------------------------------------------

    def check_scoring(self) -> None:
        """See :class:`~specrag.models.roles.TextScorer`. Finds out once how to score, and remembers it."""
        with self._probing:
            if not self._ways:
                found = {form: way for form in self._prompts.forms if (way := self._probe(form)) is not None}
                if not found:
                    raise self._cannot_score()
                self._ways = found

    def scoring(self, requests: Sequence[ScoringRequest]) -> Coroutine[list[ScoredText]]:
        for request in requests:
            self._room(request.prompt, "".join(part.text for part in request.parts))
        return self._scoring(requests)

    def _scoring(self, requests: Sequence[ScoringRequest]) -> Coroutine[list[ScoredText]]:
        if not self._ways:
            yield Search(self.check_scoring, remote=True)
        sent: list[ScoringCall] = []
        ways: list[ScoringMode] = []
        for request in requests:
            way = self._ways.get(self._prompts.form(request.prompt))
            if way is None:
                raise self._cannot_score(self._prompts.form(request.prompt))
            ways.append(way)
            sent.append(self._prompts.scoring(request, way))
        scored: dict[int, ScoredText] = {}
        calls = self._connection.begin([one.call for one in sent])
        try:
            for _ in sent:
                answered = yield Search(calls.next, remote=True)
                number = answered.number
                scored[number] = _scored(requests[number], sent[number], ways[number], answered.answer())
        finally:
            calls.cancel()
        return [scored[number] for number in range(len(sent))]

    def _probe(self, form: PromptForm) -> ScoringMode | None:
        """The first scoring mode in which the endpoint gives log-probabilities of a sample text."""
        prompt: TextPrompt = _PROBE if form != "messages" else [{"role": "user", "content": "Two and two?"}]
        request = ScoringRequest(prompt, (_PROBED_PART,))
        for way in SCORING_MODES[form]:
            sent = self._prompts.scoring(request, way)
            try:
                found = _scored(request, sent, way, self._connection.ask(sent.call))
            except (Refused, NoLogProbs):
                continue
            if found.parts[_PROBED_PART.name].count:
                return way
        return None

    def _cannot_score(self, form: PromptForm | None = None) -> InputError:
        remedy = (
            "it gives no log-probabilities of given text, which a verifier must; take a server with prompt_logprobs "
            "or with echo and logprobs, such as vLLM, or a local model"
        )
        if form == "messages":
            remedy = "it scores texts, not conversations; name the tokenizer, so that the template is filled in here"
        return InputError("verifier", self.name, remedy)

    def _fitted(self, request: TextRequest) -> TextRequest:
        """The request, limited to the tokens that fit the context: servers refuse where a local model just stops."""
        room = self._room(request.prompt, request.lead)
        return request if room is None else replace(request, max_tokens=min(request.max_tokens, room))

    def _room(self, prompt: TextPrompt, lead: str) -> int | None:
        """How many tokens the context has room for after a prompt; ``None`` if only the server can tell.

        Raises:
            ContextLengthError: there is no room for a single token.
        """
        limit = self.context_length
        if limit is None or not self._prompts.counts_exactly:
            return None
        tokens = self.count(prompt, lead)
        if tokens >= limit:
            remedy = f"the model's context holds {limit:,}; shorten the passages or take another model"
            raise ContextLengthError("prompt", f"{tokens:,} tokens", remedy)
        return limit - tokens


class PooledEndpoint(Endpoint):
    """A model behind a pool, as a text generator and scorer.

    Args:
        pool: makes the calls; the caller keeps ownership and closes it.
        tokenizer: the endpoints' tokenizer, if it is available here.
        context_length: tokens of the model's context, if the endpoints do not tell.
    """

    def __init__(
        self, pool: Pool, tokenizer: Tokenizer | None = None, context_length: int | None = None
    ) -> None:
        settings = EndpointSettings(context_length=context_length)
        super().__init__(pool.name, pool.name, settings, tokenizer, connection=pool)
        self._pool = pool

    @property
    def name(self) -> str:
        """The pool's name; its addresses are never shown."""
        return self._pool.name

    @property
    def context_length(self) -> int | None:
        """Context length according to the settings or the endpoints; ``None`` if neither says."""
        return self._context_length or self._pool.context_length

    def _generating(self, requests: Sequence[TextRequest]) -> Coroutine[list[GeneratedText]]:
        with self._named():
            return (yield from super()._generating(requests))

    def _scoring(self, requests: Sequence[ScoringRequest]) -> Coroutine[list[ScoredText]]:
        with self._named():
            return (yield from super()._scoring(requests))

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Make errors about answers name the pool."""
        try:
            yield
        except UpstreamError:
            raise
        except EndpointUnavailable as error:
            raise UpstreamError(self.name, str(error)) from None


def open_endpoint(address: str, settings: EndpointSettings | None = None) -> Endpoint:
    """Open an endpoint and check that it answers.

    Args:
        address: ``http://HOST:PORT/v1#MODEL``.
        settings: how to talk to it; the key comes from the environment.

    Raises:
        InputError: the address cannot be used, or the endpoint does not serve the model.
        EndpointUnavailable: it does not answer.
    """
    chosen = settings or EndpointSettings()
    parts = urlsplit(address)
    form = "give http://HOST:PORT/v1#MODEL"
    if parts.username is not None or parts.password is not None:
        raise InputError("endpoint", "(not shown)", f"{form}; the key comes from {chosen.key_variable}")
    try:
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        named = False
    if not named or not parts.fragment or parts.query:
        raise InputError("endpoint", address, form)
    tokenizer = None
    if chosen.tokenizer is not None:
        from specrag.models.catalog import resolve

        tokenizer = Tokenizer(resolve(chosen.tokenizer))
    url = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
    endpoint = Endpoint(url, parts.fragment, chosen, tokenizer)
    try:
        endpoint.connect()
    except BaseException:
        endpoint.close()
        raise
    return endpoint


def _scored(request: ScoringRequest, sent: ScoringCall, way: ScoringMode, answer: Any) -> ScoredText:
    """Read the log-probabilities of the parts from an answer.

    Raises:
        NoLogProbs, EndpointUnavailable: the answer does not contain them.
    """
    pieces: list[Piece]
    if way == "prompt":
        pieces = read_prompt_log_probs(answer, sent.tokens)
    else:
        pieces = read_echo(answer, sent.tokens, sent.text or None, generated=int(way == "echo-one"))
    starts = sent.starts_of(pieces)
    found: dict[str, list[float]] = {part.name: [] for part in request.parts if part.scored}
    for part, piece in zip(assign(starts, sent.borders), pieces, strict=True):
        if part >= 0 and request.parts[part].scored and piece.log_prob is not None:
            found[request.parts[part].name].append(piece.log_prob)
    total = prompt_tokens(answer) or len(pieces)
    return ScoredText({name: PartScore(tuple(values)) for name, values in found.items()}, total, total)
