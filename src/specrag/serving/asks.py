"""From a request's body to checked plans: the options of its texts, its seeds, its method."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request

from specrag.engine.threads import compute_alone
from specrag.errors import ContextLengthError, DeadlineExceeded, InputError
from specrag.methods.generation import Prompt
from specrag.methods.options import Options
from specrag.methods.rag_prompt import Message
from specrag.serving.keys import ApiKey
from specrag.serving.methods import make_plan, served_method
from specrag.serving.plans import Ask, Plan
from specrag.serving.problems import ApiError
from specrag.serving.schemas import GenerationBody, SpecragField
from specrag.serving.service import PREPARED
from specrag.serving.streaming import unless_gone

if TYPE_CHECKING:
    from specrag.engine.processors import LogitsProcessor
    from specrag.serving.service import Service

T = TypeVar("T")

_CUT = 64  # tokens by which the beginning of a text may be longer than in the whole

_NUMBERS = ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")

# Reading a long prompt takes a while: not in the event loop, and not in more threads than there are processors to win.
_threads = ThreadPoolExecutor(PREPARED, thread_name_prefix="specrag-prepare", initializer=compute_alone)


async def prepare(
    request: Request, service: Service, function: Callable[[], T], arrived: float, deadline: float | None
) -> T:
    """Run a function that tokenizes, checks or opens files beside the event loop, in its turn and in time.

    Args:
        request: ends the wait when its client goes away.
        arrived: when it came, by ``time.perf_counter``.
        deadline: seconds from there that the client allows; at most those of the settings.

    Raises:
        ApiError: too many wait.
        DeadlineExceeded: the time is over.
        Cancelled: the client has gone.
    """
    allowed = service.settings.deadline
    ends = arrived + (allowed if deadline is None else min(deadline, allowed))
    try:
        async with asyncio.timeout(max(ends - time.perf_counter(), 0.001)):
            return await unless_gone(request, _in_turn(service, function))
    except TimeoutError:
        raise DeadlineExceeded("the request's time was over before it was prepared") from None


async def _in_turn(service: Service, function: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    ticket = await service.preparations.enter(1, 0)

    def release(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop of a server that was stopped
            loop.call_soon_threadsafe(ticket.release)

    working = _threads.submit(function)
    # Not where it is waited for: whoever gives up leaves the thread at work, or it never begins.
    working.add_done_callback(release)
    return await asyncio.wrap_future(working)


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks, and of which server."""

    service: Service
    key: ApiKey

    def method(self, wish: SpecragField) -> str:
        """The method of a request that may leave it to the server; plain where that one needs a knowledge base."""
        if wish.method is not None:
            return wish.method
        usual = self.service.settings.method
        return "plain" if wish.kb is None and served_method(usual).needs_kb else usual

    def ask(
        self,
        body: GenerationBody,
        prompt: Prompt,
        options: Options,
        *,
        question: str,
        history: Sequence[Message] = (),
        system: str | None = None,
    ) -> Ask:
        """One text of a request; the others differ in their seeds.

        Raises:
            InputError: the knowledge base cannot be used.
        """
        wish = body.specrag or SpecragField()
        kb = None if wish.kb is None else self.service.knowledge_base(wish.kb, self.key.may_read)
        llm = self.service.llm
        formed = bool(options.get("processors"))
        datastores = self.service.datastores_of(self.key.may_read)
        corpora = self.service.corpora_of(self.key.may_read)
        return Ask(
            llm=llm,
            prompt=prompt,
            question=question,
            history=tuple(history),
            system=system,
            options=options,
            wish=wish,
            kb=kb,
            datastores=datastores,
            corpora=corpora,
            drafters=self.service.settings.drafters,
            rag_drafter=self.service.rag_drafter or llm,
            formed=formed,
            methods=self.service.methods,
        )

    def options(
        self, body: GenerationBody, max_tokens: int | None, processors: Sequence[LogitsProcessor] = ()
    ) -> Options:
        """The generation's options that a body gives.

        Raises:
            InputError: a token of ``logit_bias`` is no number.
        """
        wish = body.specrag or SpecragField()
        # As OpenAI's: 1. An answer from passages is to say what they say.
        options: Options = {"temperature": 1.0 if wish.kb is None else 0.0, "tenant": self.key.name}
        if body.temperature is not None:
            options["temperature"] = body.temperature
        for name in _NUMBERS:
            value = getattr(body, name)
            if value is not None:
                options[name] = value  # type: ignore[literal-required]
        if body.top_p == 0:  # the likeliest token alone, which is what clients mean by it
            options["top_p"], options["top_k"] = 1.0, 1
        elif body.top_k is not None:
            options["top_k"] = max(body.top_k, 0)
        if body.stop is not None:
            options["stop"] = tuple([body.stop] if isinstance(body.stop, str) else body.stop)
        if body.logit_bias:
            options["logit_bias"] = _bias(body.logit_bias)
        if body.ignore_eos:
            options["ignore_eos"] = True
        if processors:
            options["processors"] = tuple(processors)
        # Where nothing is drawn, passages may still be dealt out by the seed: equal requests get equal answers.
        unseeded = 0 if options["temperature"] == 0 else secrets.randbits(62)
        options["seed"] = unseeded if body.seed is None else body.seed
        limit = self.service.settings.max_output_tokens
        asked = max_tokens if limit is None else min(limit, max_tokens or limit)
        if asked is not None:
            options["max_tokens"] = asked
        return options

    def plans(self, ask: Ask, count: int) -> list[Plan]:
        """Checked plans for several choices of one ask.

        Raises:
            InputError: a value cannot be used.
            ContextLengthError: the prompt does not fit.
        """
        if ask.kb is None:  # else earlier messages give way, and the method says what is too long
            self.check_length(ask)
        name = self.method(ask.wish)
        seed = ask.options["seed"]
        greedy = ask.options["temperature"] == 0
        return [
            make_plan(ask if index == 0 or greedy else ask.with_seed(choice_seed(seed, index)), name)
            for index in range(count)
        ]

    def check_length(self, ask: Ask) -> None:
        """Refuse a prompt that is longer than the settings or the model allow.

        Raises:
            ContextLengthError: it is.
        """
        tokens = len(self.service.llm.encode(ask.prompt, raw=ask.options.get("raw", False)))
        if tokens > self._most_tokens:
            raise _too_long(f"{tokens:,} tokens", self._most_tokens)

    def check_sizes(self, texts: Sequence[str]) -> None:
        """Refuse texts that cannot fit, before they are tokenized: by their bytes, then by their beginnings.

        Args:
            texts: parts of one prompt; none holds half of a surrogate pair.

        Raises:
            ContextLengthError: they are too long together, or one of them is alone.
        """
        tokenizer, most = self.service.llm.tokenizer, self._most_tokens
        size = sum(len(text.encode()) for text in texts)
        if size > most * tokenizer.longest_token:
            raise _too_long(f"{size:,} bytes", most)
        for text in texts:
            length = 2 * most
            while length < len(text):
                # The end of a beginning may be a few tokens more than it is in the whole.
                tokens = len(tokenizer.encode(text[:length], special=False))
                if tokens > most + _CUT:
                    raise _too_long(f"more than {tokens:,} tokens", most)
                length *= 2

    @property
    def _most_tokens(self) -> int:
        limit, known = self.service.settings.max_prompt_tokens, self.service.llm.context_length
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


def _too_long(size: str, most: int) -> ContextLengthError:
    return ContextLengthError("prompt", size, f"at most {most:,} tokens are taken; shorten it")


def choice_seed(seed: int, index: int) -> int:
    """The seed of a further choice: a function of the request's and the choice's number."""
    if index == 0:
        return seed
    text = f"{seed:x}/choice/{index:x}"
    return int.from_bytes(hashlib.blake2b(text.encode("ascii"), digest_size=7).digest(), "little")


def check_text(field: str, text: str) -> str:
    """A text that can be encoded.

    Raises:
        InputError: it holds half of a surrogate pair, which JSON can write and UTF-8 cannot.
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
