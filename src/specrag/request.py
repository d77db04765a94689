"""What goes down to a method and what comes up: a request; events; one result."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, TypedDict

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specrag.checks import nearest
from specrag.engine.processors import LogitsProcessor
from specrag.engine.sampling import SamplingParams
from specrag.engine.stopping import FinishReason, StopConditions
from specrag.errors import InputError
from specrag.retrieval.passage import Hit, Passage
from specrag.speculation.decode import DecodedToken

if TYPE_CHECKING:
    from specrag.retrieval.documents.contexts import ContextItem

#: Most alternatives that ``log_probs`` may ask for.
MAX_ALTERNATIVES = 20

DEFAULT_MAX_TOKENS = 256

#: How tokens are decoded where nobody says.
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
        top_k: draw among this many tokens; 0, the default, among all.
        top_p: draw among the most probable tokens that together have this probability (default 1).
        min_p: leave out tokens less probable than this share of the most probable one (default 0).
        repetition_penalty: above 1 makes tokens of prompt and output less probable.
        presence_penalty: subtracted from the logits of tokens that the output holds.
        frequency_penalty: subtracted once for each time that the output holds a token.
        logit_bias: added to the logits of these tokens; ``-inf`` forbids one.
        seed: the same seed gives the same text (default 0).
        stop: a string or several; the text ends before the first of them.
        log_probs: report log-probabilities, with this many alternatives (0 for none).
        processors: logits processors of your own, after the built-in ones.
        raw: take a text as it is; by default it is put into the model's chat template if there is one.
        ignore_eos: do not end at the model's end tokens (for measuring).
        method: how tokens are decoded: a name, or a decoder of your own
            (:class:`~specrag.methods.base.Decoder`).
        references: texts that the output may quote, such as retrieved passages, also those that the prompt
            does not hold; methods that copy guesses from texts use them.
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
    """:class:`Options` with their defaults, every value checked.

    Attributes:
        stop: without the model's end tokens, which are not known yet.
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
    """Check every value; needs no model.

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
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_ALTERNATIVES:
        raise InputError("log_probs", value, f"give an integer from 0 to {MAX_ALTERNATIVES}")
    return value


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
    """How passages are found, checked.

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
    """What is asked of a method.

    Attributes:
        prompt: a question, a conversation that ends with one, or token ids.
        options: of the generation, without ``method``; also ``tenant`` and ``timeout``.
        search: how passages are found, for methods that find some.
        documents: a long context: texts, paths or documents that have been read.
        passages: to answer from in place of a search, best first; ``None`` for a search.
    """

    prompt: Prompt
    options: Options = field(default_factory=lambda: Options())
    search: SearchOptions = field(default_factory=lambda: SearchOptions())
    documents: Sequence[ContextItem] = ()
    passages: Sequence[Passage] | None = None

    @property
    def question(self) -> str:
        """What is asked: the text, or the last message.

        Raises:
            InputError: the prompt holds token ids, which say nothing to a search.
        """
        if isinstance(self.prompt, str):
            return self.prompt
        messages = self._messages
        if not messages or messages[-1].get("role") != "user":
            raise InputError("prompt", "no question", "end with the user's question")
        return messages[-1]["content"]

    @property
    def history(self) -> tuple[Message, ...]:
        """Earlier messages, oldest first, without the system's."""
        earlier = () if isinstance(self.prompt, str) else self._messages[:-1]
        return tuple(message for message in earlier if message["role"] != "system")

    @property
    def system(self) -> str | None:
        """The system message, if there is one."""
        if isinstance(self.prompt, str):
            return None
        said = [message["content"] for message in self._messages if message["role"] == "system"]
        return "\n\n".join(said) or None

    @property
    def is_formed(self) -> bool:
        """Whether the text is kept to a form, so that nothing may be put in front of it."""
        return bool(self.options.get("processors"))

    @property
    def tenant(self) -> str:
        """Who asks: keys and values, drafts and learned costs of texts are kept apart by it."""
        return self.options.get("tenant", "")

    @property
    def _messages(self) -> tuple[Message, ...]:
        if any(not isinstance(part, Mapping) for part in self.prompt):
            raise InputError("prompt", "token ids", "give a question in words; it is searched with")
        return tuple(self.prompt)  # type: ignore[arg-type]


# -- what comes up ----------------------------------------------------------------------------------------------


class Event:
    """Something that a method tells while it works.

    A :class:`~specrag.speculation.decode.Step`, which all methods have in common, is none: it has text and tokens.
    """

    __slots__ = ()

    #: In streams: ``sources``, ``draft``.
    name: ClassVar[str]

    @property
    def text_gained(self) -> str:
        """Characters that the answer gains."""
        return ""

    @property
    def text_lost(self) -> int:
        """Characters that the answer loses at its end."""
        return 0

    @property
    def status(self) -> str:
        """What goes on now, for people who wait; empty for nothing new."""
        return ""

    def describe(self) -> dict[str, Any] | None:
        """The event for clients, as JSON; ``None`` where they have no use for it."""
        return None


#: The answer where nothing relevant was found.
ABSTENTION = "The knowledge base holds nothing about this question."


def file_name(source: str) -> str:
    """Where a passage is from, for clients: of a path on this machine the file's name alone."""
    return source.rpartition("/")[2] if source.startswith("/") else source


@dataclass(frozen=True, slots=True)
class Source:
    """A passage in the prompt.

    Attributes:
        number: by which the answer cites it, from 1.
        score: as the search gave it; its scale depends on the index.
        similarity: cosine of its vector and the question's; ``None`` where it was not asked for.
        cited: whether the answer cites it.
        support: share of the answer's content words that the passage holds, whether cited or not; ``None`` where
            there is no answer.
    """

    number: int
    passage: Passage
    score: float
    similarity: float | None = None
    cited: bool = False
    support: float | None = None

    def describe(self) -> dict[str, Any]:
        """The source for clients, as JSON.

        Metadata are left out: they may hold what a knowledge base's owner did not mean to show; of a path on this
        machine the file's name alone is told.
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
    """The note of an abstention although passages were found."""
    best = max(source.similarity or 0.0 for source in sources)
    below = "" if least is None else f", below {least:.2f}"
    remedy = "with abstain=false it is answered all the same"
    return f"the most similar passage has a similarity of {best:.2f}{below}; {remedy}"


@dataclass(frozen=True, slots=True)
class Sources(Event):
    """The first event of a streamed answer: retrieval is done.

    Attributes:
        question: as it was searched with.
        sources: the passages in the prompt, best first; those found, where the answer is an abstention.
        left_out: passages found for which the prompt had no room.
        shortened: whether the best passage was cut, because it alone did not fit.
        abstained: nothing relevant was found: no text will be generated.
        rewrite_seconds: time of rewriting the question.
        retrieval_seconds: time of the search, the question's encoding included.
        least_similarity: below this similarity of the best passage nothing is answered, unless it shares the question's
            words; ``None`` where similarity does not count.
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
    """Wall-clock seconds of a request, without those of compiling at a first run.

    Attributes:
        prefill: from the start until the prompt has been read. The pass that reads its end often gives the first token.
        decode: from there to the end.
        drafting: seconds of decoding in which drafts were made.
        verifying: seconds of decoding in the target's passes, waiting for others included.
        phases: of other work in front of the prompt or behind the text, by name: ``retrieval``, ``rewrite``.
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
        cached_tokens: those of them found in the prefix cache.
        completion_tokens: tokens generated, a stop token included.
        passes: passes of the model after the prefill.
        drafted_by: tokens guessed, by source.
        accepted_by: guesses kept, by source.
        relaxed: guesses kept although the target would have chosen another token.
        pasted: tokens of the prompt whose keys and values were made behind another text (``reuse="blocks"``), so that
            the answer is an approximation of the model's.
        exact: whether every lossless method writes this text to the letter (``batch_invariant``); else two of them may
            part where two tokens are almost equally likely; ``None`` where it is not known.
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
        """Tokens guessed."""
        return sum(self.drafted_by.values())

    @property
    def accepted(self) -> int:
        """Guesses kept."""
        return sum(self.accepted_by.values())

    @property
    def acceptance(self) -> float | None:
        """Share of the guesses that were kept; ``None`` where nothing was guessed."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens a pass (MAT), the bonus token included."""
        return self.completion_tokens / self.passes if self.passes else 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """A finished text.

    Attributes:
        text: the text, without stop token or stop string.
        tokens: every token with its source and, if asked for, its log-probability; where the method tells them.
        finish_reason: ``"stop"`` or ``"length"``.
        sources: the passages that it rests on.
        retrieved: passages that searches gave.
        missing: shards of the passages that did not answer, where a part of them was enough: the text rests on the
            others alone.
        details: what only its method tells; ``None`` for a method that has nothing more to tell.
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
        """For notebooks: the text, and below it the sources that it rests on."""
        abstained = self.details is not None and self.details.summary().get("abstained")
        rows = [] if abstained else [_source_line(source) for source in self.sources]
        return "\n\n".join([self.text, "\n".join(rows)]) if rows else self.text

    @property
    def tokens_per_second(self) -> float:
        """Of decoding alone."""
        return self.usage.completion_tokens / self.timing.decode if self.timing.decode else 0.0

    def describe_usage(self) -> dict[str, Any]:
        """Counts and seconds for clients, as JSON; a rate that nothing was measured for is null."""
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
    """A source as a list item of Markdown; titles and names are shown as they are, whatever marks they hold."""
    passage = source.passage
    shown = [passage.title or passage.source, file_name(passage.source), passage.place]
    title, *where = (_MARKDOWN.sub(r"\\\1", " ".join(text.split())) for text in shown if text)
    name = f"**{title}**" if source.cited else title
    return f"- \\[{source.number}\\] {', '.join([name, *where])}{' (used)' if source.cited else ''}"


class Details:
    """What one method tells of its results beside what all tell."""

    __slots__ = ()

    def summary(self) -> dict[str, Any]:
        """The few fields that clients of a server see, as JSON."""
        return {}

    def record(self) -> dict[str, Any]:
        """Everything, as JSON, for ``--json`` and for later analysis."""
        return self.summary()

    def notes(self) -> list[str]:
        """What a reader should know before trusting the answer."""
        return []

    def figures(self) -> list[str]:
        """Phrases about this method's work for people, such as ``12 retrievals``."""
        return []

    def tables(self) -> list[Table]:
        """What a terminal shows beneath the answer, where details are wanted."""
        return []


@dataclass(frozen=True, slots=True)
class Table:
    """Rows for people.

    Attributes:
        title: in front of it.
        columns: their heads; none for rows that need none.
        rows: of texts, in the columns' order.
        best: number of the row that counts most, from 0.
        always: shown whether details are wanted or not.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: int | None = None
    always: bool = False
