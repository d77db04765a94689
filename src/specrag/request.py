"""What a method takes and gives back: a request; events while it works; one result."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, TypedDict

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specrag.checks import check_whole, nearest
from specrag.engine import SamplingParams, StopConditions
from specrag.errors import InputError

if TYPE_CHECKING:
    from specrag.engine import FinishReason, LogitsProcessor
    from specrag.retrieval import Hit, Passage
    from specrag.retrieval.documents import ContextItem
    from specrag.speculation import DecodedToken

#: The most alternatives that ``log_probs`` may ask for.
MAX_ALTERNATIVES = 20

DEFAULT_MAX_TOKENS = 256

#: How a text is decoded if whoever generates it names no method; calls of users have ``registry.DEFAULT_METHOD``.
DEFAULT_DECODER = "plain"

# -- what is asked ----------------------------------------------------------------------------------------------

#: ``{"role": "user", "content": "..."}``.
Message: TypeAlias = Mapping[str, str]

#: A text, a conversation (oldest message first), or token ids.
Prompt: TypeAlias = str | Sequence[Message] | Sequence[int]


class Options(TypedDict, total=False):
    """Keyword arguments of every generating call.

    Args:
        max_tokens: at most this many tokens (default 256).
        temperature: 0, the default, takes the most probable token every time.
        top_k: sample from this many most probable tokens; 0, the default, from all.
        top_p: sample from the most probable tokens that together have this probability (default 1).
        min_p: leave out tokens less probable than this share of the most probable one (default 0).
        repetition_penalty: above 1 makes tokens of the prompt and the output less probable.
        presence_penalty: subtracted from the logits of tokens that occur in the output.
        frequency_penalty: subtracted once for each time that a token occurs in the output.
        logit_bias: added to the logits of these tokens; ``-inf`` forbids one.
        seed: the same seed gives the same text (default 0).
        stop: a string or several; the text ends before the first of them.
        log_probs: report log-probabilities, with this many alternatives (0 for none).
        processors: your own logits processors, applied after the built-in ones.
        raw: do not put a text into the model's chat template, which is the default if there is one.
        ignore_eos: do not stop at the model's end tokens (for measuring).
        method: how tokens are decoded: a name, or your own decoder
            (:class:`~specrag.methods.base.Decoder`).
        references: texts that the output may quote, such as retrieved passages, in the prompt or not; methods that
            draft by copying from texts use them.
        tenant: whose prefix cache to use.
        timeout: seconds after which the request ends with an error.
    """

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: str | Sequence[str]
    log_probs: int
    processors: Sequence[LogitsProcessor]
    raw: bool
    ignore_eos: bool
    method: Any
    references: Sequence[str]
    tenant: str
    timeout: float


@dataclass(frozen=True, slots=True)
class CheckedOptions:
    """:class:`Options` with defaults filled in and every value checked.

    Attributes:
        stop: the stop conditions, without the model's end tokens, which are not known yet.
    """

    method: Any
    sampling: SamplingParams
    stop: StopConditions
    log_probs: int | None
    processors: Sequence[LogitsProcessor]
    raw: bool
    ignore_eos: bool
    references: tuple[str, ...]
    tenant: str
    timeout: float | None


_SAMPLING = tuple(field.name for field in fields(SamplingParams))


def check_options(options: Options) -> CheckedOptions:
    """Check every option; needs no model.

    Raises:
        InputError: an option is unknown or its value cannot be used.
    """
    unknown = set(options) - set(Options.__annotations__)
    if unknown:
        name = min(unknown)
        near = nearest(name, Options.__annotations__)
        known = f"did you mean {near}?" if near else f"take one of {', '.join(Options.__annotations__)}"
        raise InputError("option", name, known)
    return CheckedOptions(
        method=_method(options.get("method", DEFAULT_DECODER)),
        sampling=SamplingParams(**{name: options[name] for name in _SAMPLING if name in options}),  # type: ignore[literal-required]
        stop=_stop_conditions(options),
        log_probs=_log_probs(options.get("log_probs")),
        processors=options.get("processors", ()),
        raw=options.get("raw", False),
        ignore_eos=options.get("ignore_eos", False),
        references=_references(options.get("references", ())),
        tenant=options.get("tenant", ""),
        timeout=_timeout(options.get("timeout")),
    )


def _method(value: Any) -> Any:
    if not isinstance(value, str) and not callable(getattr(value, "decode", None)):
        raise InputError("method", value, "give a method's name or a configured method")
    return value


def _references(value: Sequence[str]) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(text, str) for text in value):
        raise InputError("references", value, "give a list of texts")
    return tuple(value)


def _stop_conditions(options: Options) -> StopConditions:
    stop = options.get("stop", ())
    strings = (stop,) if isinstance(stop, str) else stop
    try:
        return StopConditions(options.get("max_tokens", DEFAULT_MAX_TOKENS), frozenset(), strings)  # type: ignore[arg-type]
    except InputError as error:
        if error.field == "stop_strings":  # callers know it as ``stop``
            raise InputError("stop", error.value, error.remedy) from None
        raise


def _log_probs(value: int | None) -> int | None:
    if value is None:
        return None
    return check_whole(
        "log_probs", value, 0, MAX_ALTERNATIVES, f"give an integer from 0 to {MAX_ALTERNATIVES}"
    )


def _timeout(value: float | None) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InputError("timeout", value, "give seconds, more than 0")
    return float(value)


class SearchOptions(BaseModel):
    """How passages are found; the same for every method that finds some.

    Attributes:
        rerank: name of a cross-encoder.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    k: Annotated[int, Field(ge=1, le=100)] | None = Field(
        None, description="Passages found (default 5; 10 for drafts)."
    )
    index: Literal["flat", "hnsw", "bm25", "hybrid"] | None = Field(
        None,
        description="Which index finds them (default hybrid; flat where a search comes every few tokens).",
    )
    where: (
        Annotated[tuple[Annotated[str, Field(max_length=1000)], ...], Field(max_length=32)] | dict[str, Any]
    ) = Field((), description='Conditions on metadata, such as "year>=2000 and not title=A,B".')
    rerank: str | None = Field(None, max_length=128, description="A cross-encoder that orders them anew.")
    min_score: Annotated[float, Field(ge=-1, le=1)] | None = Field(
        None,
        description="Least cosine of question and best passage, else nothing is answered (default: by number).",
    )
    abstain: bool = Field(True, description="Do not answer where nothing relevant is found.")
    rewrite: bool = Field(True, description="Make a follow-up question complete before the search.")


def check_search(values: Mapping[str, Any]) -> SearchOptions:
    """Check how passages are to be found.

    Raises:
        InputError: a value cannot be used.
    """
    written = dict(values)
    if "where" in written:
        where = written["where"]
        if not isinstance(where, Mapping):
            written["where"] = (where,) if isinstance(where, str) else tuple(where)
    try:
        return SearchOptions(**written)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        name = str(problem["loc"][0]) if problem["loc"] else "search"
        raise InputError(name, written.get(name), problem["msg"].lower()) from None


@dataclass(frozen=True, slots=True)
class Request:
    """A request to a method.

    Attributes:
        prompt: a question, a conversation that ends with one, or token ids.
        options: generation options, without ``method``; also ``tenant`` and ``timeout``.
        search: how passages are found, for methods that search.
        documents: a long context: texts, paths or documents that have been read.
        passages: passages to answer from instead of searching, best first; ``None`` to search.
    """

    prompt: Prompt
    options: Options = field(default_factory=lambda: Options())
    search: SearchOptions = field(default_factory=lambda: SearchOptions())
    documents: Sequence[ContextItem] = ()
    passages: Sequence[Passage] | None = None

    @property
    def question(self) -> str:
        """The question: the text, or the last message.

        Raises:
            InputError: the prompt holds token ids, which cannot be searched with, or does not end with a question.
        """
        if isinstance(self.prompt, str):
            return self.prompt
        messages = self._messages
        if not messages or messages[-1].get("role") != "user":
            raise InputError("prompt", "no question", "end with the user's question")
        return messages[-1]["content"]

    @property
    def history(self) -> tuple[Message, ...]:
        """Earlier messages, oldest first, without system messages."""
        earlier = () if isinstance(self.prompt, str) else self._messages[:-1]
        return tuple(message for message in earlier if message["role"] != "system")

    @property
    def system(self) -> str | None:
        """The system messages, joined; ``None`` if there are none."""
        if isinstance(self.prompt, str):
            return None
        said = [message["content"] for message in self._messages if message["role"] == "system"]
        return "\n\n".join(said) or None

    @property
    def is_formed(self) -> bool:
        """Whether the output is constrained to a form, so that nothing may be put in front of it."""
        return bool(self.options.get("processors"))

    @property
    def tenant(self) -> str:
        """Who asks; the KV caches, drafts and learned costs of different tenants are kept apart."""
        return self.options.get("tenant", "")

    @property
    def _messages(self) -> tuple[Message, ...]:
        if any(not isinstance(part, Mapping) for part in self.prompt):
            raise InputError("prompt", "token ids", "give a question in words; it is searched with")
        return tuple(self.prompt)  # type: ignore[arg-type]


# -- what comes back --------------------------------------------------------------------------------------------


class Event:
    """Something that a method reports while it works.

    A :class:`~specrag.speculation.decode.Step`, which all methods emit, is not an event: it carries text and tokens.
    """

    __slots__ = ()

    #: The event's name in streams: ``sources``, ``draft``.
    name: ClassVar[str]

    @property
    def text_gained(self) -> str:
        """Characters added to the answer."""
        return ""

    @property
    def text_lost(self) -> int:
        """Number of characters removed from the answer's end."""
        return 0

    @property
    def status(self) -> str:
        """What is going on now, for people who wait; empty if nothing is new."""
        return ""

    def describe(self) -> dict[str, Any] | None:
        """The event for clients, as JSON; ``None`` if they have no use for it."""
        return None


#: The answer if nothing relevant was found.
ABSTENTION = "The knowledge base holds nothing about this question."


def file_name(source: str) -> str:
    """A passage's source as shown to clients: a path on this machine is reduced to the file's name."""
    return source.rpartition("/")[2] if source.startswith("/") else source


@dataclass(frozen=True, slots=True)
class Source:
    """A passage in the prompt.

    Attributes:
        number: the number by which the answer cites it, from 1.
        score: the score given by the search; its scale depends on the index.
        similarity: cosine of its vector and the question's; ``None`` if it was not asked for.
        cited: whether the answer cites it.
        support: share of the answer's content words that occur in the passage, cited or not; ``None`` if there is no
            answer.
    """

    number: int
    passage: Passage
    score: float
    similarity: float | None = None
    cited: bool = False
    support: float | None = None

    def describe(self) -> dict[str, Any]:
        """The source for clients, as JSON.

        Metadata are left out, since they may hold what the knowledge base's owner did not mean to show. A path on this
        machine is reduced to the file's name.
        """
        passage = self.passage
        return {
            "number": self.number,
            "title": passage.title,
            "source": file_name(passage.source),
            "place": passage.place,
            "text": passage.text,
            "score": self.score,
            "similarity": self.similarity,
            "cited": self.cited,
            "support": self.support,
        }


def nothing_relevant(sources: Sequence[Source], least: float | None) -> str:
    """The note on an abstention although passages were found."""
    best = max(source.similarity or 0.0 for source in sources)
    below = "" if least is None else f", below {least:.2f}"
    remedy = "with abstain=false it is answered all the same"
    return f"the most similar passage has a similarity of {best:.2f}{below}; {remedy}"


@dataclass(frozen=True, slots=True)
class Sources(Event):
    """The first event of a streamed answer: retrieval is done.

    Attributes:
        question: the question that was searched with.
        sources: the passages in the prompt, best first; in case of an abstention, the passages found.
        left_out: passages found that did not fit into the prompt.
        shortened: whether the best passage was cut, because it did not fit even alone.
        abstained: nothing relevant was found, so no text will be generated.
        rewrite_seconds: time spent rewriting the question.
        retrieval_seconds: time of the search, including the encoding of the question.
        least_similarity: if the best passage is less similar than this and does not share the question's words,
            nothing is answered; ``None`` if similarity does not count.
    """

    question: str
    sources: tuple[Source, ...]
    left_out: tuple[Hit, ...]
    shortened: bool
    abstained: bool
    rewrite_seconds: float
    retrieval_seconds: float
    least_similarity: float | None = None

    name = "sources"

    def describe(self) -> dict[str, Any]:
        """See :class:`Event`."""
        return {
            "sources": [source.describe() for source in self.sources],
            "question": self.question,
            "abstained": self.abstained,
            "least_similarity": self.least_similarity,
            "left_out": len(self.left_out),
            "retrieval_seconds": self.retrieval_seconds,
            "rewrite_seconds": self.rewrite_seconds,
        }


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall-clock seconds of a request, without compilation at a first run.

    Attributes:
        prefill: from the start until the prompt has been read; the last prefill pass often yields the first token.
        decode: from there to the end.
        drafting: seconds of decoding spent on drafts.
        verifying: seconds of decoding spent in the target's passes, including waiting for other requests.
        phases: seconds of other work before the prompt or after the text, by name: ``retrieval``, ``rewrite``.
    """

    prefill: float
    decode: float
    drafting: float = 0.0
    verifying: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Seconds of the whole request."""
        return sum(self.phases.values()) + self.prefill + self.decode

    def describe(self) -> dict[str, float]:
        """Seconds by phase, as JSON."""
        return {
            **self.phases,
            "prefill": self.prefill,
            "decode": self.decode,
            "drafting": self.drafting,
            "verifying": self.verifying,
        }


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of a request.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: prompt tokens found in the prefix cache.
        completion_tokens: tokens generated, including a stop token.
        passes: passes of the model after the prefill.
        drafted_by: drafted tokens, by source.
        accepted_by: accepted drafted tokens, by source.
        relaxed: drafted tokens accepted although the target would have chosen another.
        pasted: prompt tokens whose keys and values were computed after another text (``reuse="blocks"``), so the answer
            only approximates the model's.
        exact: whether every lossless method writes exactly this text (``batch_invariant``); if false, two of them may
            diverge where two tokens are almost equally likely; ``None`` if not known.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    passes: int
    drafted_by: Mapping[str, int]
    accepted_by: Mapping[str, int]
    relaxed: int = 0
    exact: bool | None = None
    pasted: int = 0

    @property
    def drafted(self) -> int:
        """Number of drafted tokens."""
        return sum(self.drafted_by.values())

    @property
    def accepted(self) -> int:
        """Number of accepted drafted tokens."""
        return sum(self.accepted_by.values())

    @property
    def acceptance(self) -> float | None:
        """Share of the drafted tokens that were accepted; ``None`` if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens per pass (MAT), including the bonus token."""
        return self.completion_tokens / self.passes if self.passes else 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """A finished text.

    Attributes:
        text: the text, without stop token or stop string.
        tokens: every token with its source and, if asked for, its log-probability; if the method reports them.
        finish_reason: ``"stop"`` or ``"length"``.
        sources: the passages that the text rests on.
        retrieved: number of passages returned by searches.
        missing: shards that did not answer, if some of them may be missing; the text rests on the other shards only.
        details: what only this method reports; ``None`` if it has nothing more to report.
    """

    text: str
    tokens: tuple[DecodedToken, ...]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    sources: tuple[Source, ...] = ()
    retrieved: int = 0
    details: Details | None = None
    missing: tuple[str, ...] = ()

    def __repr__(self) -> str:
        said = textwrap.shorten(self.text, 60, placeholder=" …")
        counts = f"tokens={self.usage.completion_tokens}, sources={len(self.sources)}"
        return f"Result({said!r}, finish_reason={self.finish_reason!r}, {counts})"

    def _repr_markdown_(self) -> str:
        """For notebooks: the text, followed by the sources that it rests on."""
        abstained = self.details is not None and self.details.summary().get("abstained")
        rows = [] if abstained else [_source_line(source) for source in self.sources]
        return "\n\n".join([self.text, "\n".join(rows)]) if rows else self.text

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of decoding, without the prefill."""
        return self.usage.completion_tokens / self.timing.decode if self.timing.decode else 0.0

    def describe_usage(self) -> dict[str, Any]:
        """Counts and seconds for clients, as JSON; rates that were not measured are null."""
        usage = self.usage
        return {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "drafted": usage.drafted,
            "accepted": usage.accepted,
            "drafted_by": dict(usage.drafted_by),
            "accepted_by": dict(usage.accepted_by),
            "relaxed": usage.relaxed,
            "exact": usage.exact,
            "pasted": usage.pasted,
            "retrieved": self.retrieved,
            "missing_shards": list(self.missing),
            "passes": usage.passes,
            "mat": usage.mean_accepted_tokens if usage.passes else None,
            "tokens_per_second": self.tokens_per_second if self.timing.decode else None,
            "seconds": self.timing.describe(),
        }


_MARKDOWN = re.compile(r"([\\\\`*_\[\]<>#|~$&!])")


def _source_line(source: Source) -> str:
    """A source as a Markdown list item; Markdown marks in titles and names are escaped."""
    passage = source.passage
    shown = [passage.title or passage.source, file_name(passage.source), passage.place]
    title, *where = (_MARKDOWN.sub(r"\\\1", " ".join(text.split())) for text in shown if text)
    name = f"**{title}**" if source.cited else title
    return f"- \\[{source.number}\\] {', '.join([name, *where])}{' (used)' if source.cited else ''}"


class Details:
    """What one method reports about its results, beyond what all methods report."""

    __slots__ = ()

    def summary(self) -> dict[str, Any]:
        """The few fields that clients of a server see, as JSON."""
        return {}

    def record(self) -> dict[str, Any]:
        """All fields, as JSON, for ``--json`` and later analysis."""
        return self.summary()

    def notes(self) -> list[str]:
        """What a reader should know before trusting the answer."""
        return []

    def figures(self) -> list[str]:
        """Short phrases about the method's work, for people, such as ``12 retrievals``."""
        return []

    def tables(self) -> list[Table]:
        """Tables that a terminal shows below the answer if details are wanted."""
        return []


@dataclass(frozen=True, slots=True)
class Table:
    """A table for people.

    Attributes:
        title: shown above it.
        columns: the column headings; empty if the rows need none.
        rows: the cells of each row, in the order of the columns.
        best: index of the most important row, from 0.
        always: shown even if details are not wanted.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: int | None = None
    always: bool = False
