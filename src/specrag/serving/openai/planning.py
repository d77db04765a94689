"""Turns a request's body into checked plans: its method, the options of its texts, their seeds."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import anyio
from starlette.requests import Request

from specrag.engine import use_one_thread
from specrag.errors import ContextLengthError, DeadlineExceeded, InputError
from specrag.methods import Method, Needs, Plan, make_method, mark_missing_shards, method_class
from specrag.request import Options, SearchOptions, check_search
from specrag.request import Request as TextRequest
from specrag.serving.errors import ApiError
from specrag.serving.keys import ApiKey
from specrag.serving.listings import default_method
from specrag.serving.openai.schemas import GenerationBody, ResponseFormat, SpecragField, TextBody
from specrag.serving.openai.streaming import until_gone
from specrag.serving.service import PREPARED
from specrag.serving.upstreams import refuse_sessions

if TYPE_CHECKING:
    from specrag.engine import LogitsProcessor
    from specrag.serving.served import Served
    from specrag.serving.service import Service


T = TypeVar("T")
B = TypeVar("B", bound=TextBody)

_OPTIONS = "specrag.options"
_SEARCH = frozenset(SearchOptions.model_fields)
_LONGEST_TOKEN = 128  # bytes, if the tokenizer is not known
_CUT = 64  # tokens by which a prefix of a text may be longer than it is within the whole

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")

# Tokenizing a long prompt takes a while: it stays out of the event loop, in no more threads than processors can serve.
_threads = ThreadPoolExecutor(PREPARED, thread_name_prefix="specrag-prepare", initializer=use_one_thread)


async def prepare(
    request: Request, service: Service, function: Callable[[], T], arrived: float, deadline: float | None
) -> T:
    """Run a function that tokenizes, checks or opens files outside the event loop, in its turn and in time.

    Args:
        request: ends the wait when its client goes away.
        arrived: when it arrived, by ``time.perf_counter``.
        deadline: seconds from arrival that the client allows; at most those of the settings.

    Raises:
        ApiError: too many requests wait.
        DeadlineExceeded: the time is over.
        Cancelled: the client has gone.
    """
    allowed = service.settings.deadline
    ends = arrived + (allowed if deadline is None else min(deadline, allowed))
    try:
        async with asyncio.timeout(max(ends - time.perf_counter(), 0.001)):
            return await until_gone(request.receive, _in_turn(service, function))
    except TimeoutError:
        raise DeadlineExceeded("the request's time was over before it was prepared") from None


async def _in_turn(service: Service, function: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    ticket = await service.preparations.enter(1, 0)

    def release(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the server was stopped, and its loop closed
            loop.call_soon_threadsafe(ticket.release)

    working = _threads.submit(function)
    # Not after the wait: a caller that gives up may leave the thread at work, or the work may never begin.
    working.add_done_callback(release)
    return await asyncio.wrap_future(working)


async def with_named_base(body: B, service: Service, key: ApiKey) -> B:
    """The body with the model's own name; a knowledge base that the id names (``MODEL@KB``) is put into ``specrag.kb``.

    Raises:
        ApiError: no such model is served to this key.
        InputError: the body names another knowledge base.
    """
    if service.is_model(body.model):
        named = body.model if body.model in service.model_names else service.settings.name
        return body.model_copy(update={"model": named})
    kb = await anyio.to_thread.run_sync(service.kb_of, body.model, key.may_read)
    if body.extension.kb not in (None, kb):
        raise InputError(
            "specrag.kb", body.extension.kb, f"the model {body.model} answers from {kb}; name one base"
        )
    name = body.model.rpartition("@")[0]
    named = name if name in service.model_names else service.settings.name
    extension = body.extension.model_copy(update={"kb": kb})
    return body.model_copy(update={"model": f"{named}@{kb}", "specrag": extension})


@dataclass(frozen=True, slots=True)
class Job:
    """The texts of a request.

    Attributes:
        method: writes them.
        plans: one per choice; those of a prompt are adjacent.
    """

    method: Method
    plans: list[Plan]


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes checked plans of a caller's requests.

    Attributes:
        prompt_field: the field of a request's body that holds the prompt, for errors.
        model: the one that the request names.
    """

    service: Service
    key: ApiKey
    prompt_field: str
    model: Served

    def method(self, body: GenerationBody) -> Method:
        """The method that a request names, or the server's, with its options.

        Raises:
            InputError: there is no such method, an option cannot be used, or the method may take back streamed text
                and the client does not ask for events.
        """
        extension = body.extension
        name = extension.method or default_method(self.service.settings.method, extension.kb is not None)
        if self.model.remote is not None:
            refuse_sessions(method_class(name, "specrag.method"), "specrag.method")
        method = make_method(name, extension.options, field="specrag.method", place=_OPTIONS)
        if method.retracts and body.stream and not extension.events:
            raise InputError("specrag.events", False, "set it to true: text that was sent may be taken back")
        return method

    def options(
        self, body: GenerationBody, max_tokens: int | None, processors: Sequence[LogitsProcessor] = ()
    ) -> Options:
        """The generation options that a body gives.

        Raises:
            InputError: a token of ``logit_bias`` is not a number.
        """
        # A tenant of its own neither reuses anybody's keys and values nor leaves any for others.
        tenant = f"{self.key.name}/{secrets.token_hex(16)}" if body.extension.fresh else self.key.name
        options: Options = {**_sampling(body), "tenant": tenant}
        if body.stop is not None:
            options["stop"] = tuple([body.stop] if isinstance(body.stop, str) else body.stop)
        if body.logit_bias:
            options["logit_bias"] = _bias(body.logit_bias)
        if body.ignore_eos:
            options["ignore_eos"] = True
        if processors:
            options["processors"] = tuple(processors)
        # Even if nothing is sampled, the seed may deal out passages: equal requests must get equal answers.
        unseeded = 0 if options["temperature"] == 0 else secrets.randbits(62)
        options["seed"] = unseeded if body.seed is None else body.seed
        limit = self.service.settings.max_output_tokens
        asked = max_tokens if limit is None else min(limit, max_tokens or limit)
        if asked is not None:
            options["max_tokens"] = asked
        return options

    def plans(self, extension: SpecragField, method: Method, request: TextRequest, count: int) -> list[Plan]:
        """Checked plans for several choices of one request; they differ in their seeds.

        Raises:
            InputError: a value cannot be used.
            ContextLengthError: the prompt does not fit.
        """
        given = self.service.resources(self.model, extension.kb, self.key.may_read)
        options: Options = {**request.options}
        if given.retriever is None:  # otherwise earlier messages are dropped, and the method checks lengths
            self.check_length(request)
            if Needs.CONTEXT not in method.needs:
                options = {"max_tokens": self.model.generator.context_length, **options}
        seed, greedy = options["seed"], options["temperature"] == 0

        def plan(index: int) -> Plan:
            chosen: Options = {**options, "seed": seed if greedy else choice_seed(seed, index)}
            with self.named(extension, method):
                made = method.plan(replace(request, options=chosen, search=_search(extension)), given)
            return replace(made, begin=lambda: mark_missing_shards(method.run(made), given.retriever))

        return [plan(index) for index in range(count)]

    @contextlib.contextmanager
    def named(self, extension: SpecragField, method: Method) -> Iterator[None]:
        """Make errors name the fields of the body."""
        try:
            yield
        except ContextLengthError:
            raise
        except InputError as error:
            name = error.field.removeprefix("--").partition(":")[0]
            if name in ("prompt", "messages"):
                place = self.prompt_field
            elif name == "kb":
                place = "specrag.kb"
            elif name in extension.options or name in method.Options.model_fields.keys() - _SEARCH:
                place = f"{_OPTIONS}.{name}"
            else:
                place = f"specrag.{name}" if name in _SEARCH else error.field
            raise InputError(place, error.value, error.remedy) from None

    def check_length(self, request: TextRequest) -> None:
        """Refuse a prompt that is longer than the settings or the model allow.

        Raises:
            ContextLengthError: it is longer.
        """
        if self.model.tokenizer is None:
            return  # the upstream checks it itself
        tokens = self.model.generator.count(request.prompt, raw=request.options.get("raw", False))
        if tokens > self._most_tokens:
            raise _too_long(f"{tokens:,} tokens", self._most_tokens)

    def check_sizes(self, texts: Sequence[str]) -> None:
        """Refuse texts that cannot fit before they are tokenized whole: by their bytes, then by their prefixes.

        Args:
            texts: parts of one prompt; none holds a lone surrogate.

        Raises:
            ContextLengthError: they are too long together, or one of them is alone.
        """
        tokenizer, most = self.model.tokenizer, self._most_tokens
        size = sum(len(text.encode()) for text in texts)
        if size > most * (_LONGEST_TOKEN if tokenizer is None else tokenizer.longest_token):
            raise _too_long(f"{size:,} bytes", most)
        if tokenizer is None:
            return
        for text in texts:
            length = 2 * most
            while length < len(text):
                # At its end a prefix may have a few tokens more than it has within the whole.
                tokens = len(tokenizer.encode(text[:length], special=False))
                if tokens > most + _CUT:
                    raise _too_long(f"more than {tokens:,} tokens", most)
                length *= 2

    @property
    def _most_tokens(self) -> int:
        limit, known = self.service.settings.max_prompt_tokens, self.model.generator.context_length
        return known if limit is None else min(limit, known)

    def check_choices(self, count: int) -> None:
        """Refuse more texts than one request may ask for.

        Raises:
            ApiError: there are more.
        """
        most = self.service.settings.max_choices
        if count > most:
            message = f"n: {count} texts are asked for in one request and at most {most} are written"
            raise ApiError(400, message, code="invalid_value", param="n")


def _sampling(body: GenerationBody) -> Options:
    # OpenAI's default is 1. An answer from passages should say what they say, so its default is 0.
    options: Options = {"temperature": 1.0 if body.extension.kb is None else 0.0}
    for name in _NUMBERS:
        value = getattr(body, name)
        if value is not None:
            options[name] = value  # type: ignore[literal-required]
    if body.top_p == 0:  # the likeliest token alone, which is what clients mean by it
        options["top_p"], options["top_k"] = 1.0, 1
    elif body.top_k is not None:
        options["top_k"] = max(body.top_k, 0)
    return options


def _search(extension: SpecragField) -> SearchOptions:
    return check_search(extension.model_dump(include=set(_SEARCH)))


def _too_long(size: str, most: int) -> ContextLengthError:
    return ContextLengthError("prompt", size, f"at most {most:,} tokens are taken; shorten it")


def choice_seed(seed: int, index: int) -> int:
    """The seed of a choice: a function of the request's seed and the choice's number."""
    if index == 0:
        return seed
    text = f"{seed:x}/choice/{index:x}"
    return int.from_bytes(hashlib.blake2b(text.encode("ascii"), digest_size=7).digest(), "little")


def check_text(field: str, text: str) -> str:
    """Return a text after checking that it can be encoded.

    Raises:
        InputError: it holds a lone surrogate, which JSON can express and UTF-8 cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(
            field, "a text", "it holds half of a surrogate pair; send whole characters"
        ) from None
    return text


def _bias(given: dict[str, float]) -> dict[int, float]:
    bias = {}
    for token, value in given.items():
        if not token.isascii() or not token.isdigit() or len(token) > 9:
            raise InputError("logit_bias", token, "give token ids, as texts of digits")
        bias[int(token)] = value
    return bias


def form_processors(service: Service, form: ResponseFormat | None) -> list[LogitsProcessor]:
    """The processors of a request's ``response_format``.

    Raises:
        InputError: there is no schema, or one that cannot be followed.
    """
    if form is None or form.type == "text":
        return []
    if form.type == "json_object":
        return [service.grammars.json()]
    if form.json_schema is None:
        raise InputError("response_format.json_schema", None, "give a name and a schema")
    schema = form.json_schema.schema_
    return [service.grammars.json(schema if schema is not None else {"type": "object"})]
