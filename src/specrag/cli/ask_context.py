"""``specrag ask QUESTION --context FILE``: an answer from long documents that the model reads whole."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specrag.cli import common, speculation
from specrag.errors import InputError, SpecragError

if TYPE_CHECKING:
    from specrag.cli.speculation import SourceColours
    from specrag.language_model import LanguageModel
    from specrag.methods.base import DecodingMethod
    from specrag.methods.long_context import LongContext
    from specrag.methods.long_context_methods import ReadsPart
    from specrag.methods.options import Options
    from specrag.retrieval.context_files import ContextFiles
    from specrag.retrieval.context_settings import ContextSettings

_PANEL = "Long context"
#: Methods whose drafter reads the relevant part, and those that only a long context has.
_DRAFTED = ("rapid", "naive-sd")
_ONLY_HERE = (*_DRAFTED, "rag", "streaming-drafter")
#: What ``--index`` calls the ways to rank chunks.
_SCORING = {"flat": "dense", "dense": "dense", "bm25": "bm25", "hybrid": "hybrid"}

Context = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="Answer from this file or folder, read whole, in place of --kb; may be repeated. "
        "With --method plain, rapid, rag, respec, naive-sd or streaming-drafter.",
        rich_help_panel=_PANEL,
    ),
]
Eta = Annotated[
    float | None,
    typer.Option(
        parser=common.number,
        metavar="X",
        help="How much of the drafter's opinion the answer takes over (rapid): 0, the default, for none; 5 to 20.",
        rich_help_panel=_PANEL,
    ),
]
Gamma = Annotated[
    int | None,
    typer.Option(
        parser=common.integer,
        metavar="N",
        help="Most guesses a round (rapid; default 10).",
        rich_help_panel=_PANEL,
    ),
]
RetrievalTokens = Annotated[
    int | None,
    typer.Option(
        parser=common.integer,
        metavar="N",
        help="Most tokens of the relevant part (default: 4,096, or a 24th of the context if that is more).",
        rich_help_panel=_PANEL,
    ),
]
TruncateMiddle = Annotated[
    bool,
    typer.Option(
        "--truncate-middle",
        help="Leave out the middle of what is too long for the model.",
        rich_help_panel=_PANEL,
    ),
]
KeepPrefix = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Keep what the model has read here, so that the next question need not read it again.",
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True, slots=True)
class ContextChoice:
    """A question about a long context, as the options describe it.

    Attributes:
        paths: files and folders.
        method: a name.
        drafter: of ``rapid``: ``self`` or a model; of others as they take it.
        eta, gamma: of ``rapid``; ``None`` for the defaults.
        retrieval_tokens: most tokens of the part; ``None`` for the paper's budget.
        index: how chunks are ranked; ``None`` for their vectors.
        truncate_middle: cut what is too long.
        keep_prefix: a folder.
        system: a message in front.
    """

    paths: tuple[Path, ...]
    method: str
    drafter: str | None
    eta: float | None
    gamma: int | None
    retrieval_tokens: int | None
    index: str | None
    truncate_middle: bool
    keep_prefix: Path | None
    system: str | None

    def refuse(self, others: Mapping[str, object]) -> None:
        """Refuse options of answering from a knowledge base.

        Args:
            others: options by name, with what was given; ``None`` and ``False`` are nothing.

        Raises:
            InputError: one was given.
        """
        for option, value in others.items():
            if value is not None and value is not False:
                raise InputError(option, value, "leave it out; --context has no use for it")

    def decoding(
        self, other: Callable[[], str | DecodingMethod], temperature: float
    ) -> str | DecodingMethod | ReadsPart:
        """The method itself.

        Args:
            other: makes it where it is not one of long contexts alone.
            temperature: of the request.

        Raises:
            InputError: the options do not fit together.
        """
        from specrag.methods.long_context_methods import NAMES, PURPOSE

        speculation.check_method(self.method, *NAMES, purpose=PURPOSE)
        for option, value in (("--eta", self.eta), ("--gamma", self.gamma)):
            if value is not None and self.method != "rapid":
                raise InputError(option, value, "only --method rapid takes it; add it")
        if self.eta is not None and self.eta > 0 and temperature == 0:
            remedy = "at temperature 0 the answer is the model's own whatever it is; add --temperature, such as 0.1"
            raise InputError("--eta", self.eta, remedy)
        if self.method not in _ONLY_HERE:
            return other()
        if self.drafter is not None and self.method not in _DRAFTED:
            raise InputError("--drafter", self.drafter, f"--method {self.method} has no use for one")
        if self.method not in _DRAFTED:
            return self.method
        from specrag.methods.rapid import GAMMA, RAPID
        from specrag.methods.rapid_baselines import naive_sd

        drafter = (self.drafter or "self").removeprefix("model:")
        if self.method == "naive-sd":
            return naive_sd(drafter)
        return RAPID(drafter, eta=self.eta or 0.0, gamma=GAMMA if self.gamma is None else self.gamma)

    def settings(self) -> ContextSettings:
        """How much of the context is read by whoever reads a part.

        Raises:
            InputError: a value cannot be used.
        """
        from specrag.retrieval.context_settings import ContextSettings

        if self.index is not None and self.index not in _SCORING:
            raise InputError("--index", self.index, "chunks of a context are ranked by flat, bm25 or hybrid")
        scoring = _SCORING[self.index or "flat"]
        if self.retrieval_tokens is None:
            return ContextSettings(scoring=scoring)  # type: ignore[arg-type]
        if self.retrieval_tokens < 1:
            raise InputError("--retrieval-tokens", self.retrieval_tokens, "give 1 or more")
        most = self.retrieval_tokens
        return ContextSettings(scoring=scoring, min_tokens=most, max_tokens=most)  # type: ignore[arg-type]

    def make(
        self,
        llm: LanguageModel,
        decoding: str | DecodingMethod | ReadsPart,
        settings: ContextSettings,
        *,
        reuse: bool,
    ) -> LongContext:
        """The method with its retriever, which is loaded here, so that no answer's time holds it."""
        from specrag.methods.long_context import LongContext
        from specrag.retrieval.context import ContextRetriever

        retriever = ContextRetriever(settings, vectors=self.keep_prefix)
        made = LongContext(
            llm,
            method=decoding,
            retriever=retriever,
            truncate_middle=self.truncate_middle,
            reuse=reuse,
            keep_prefix=self.keep_prefix,
            system=self.system,
        )
        if made.method.retrieves:
            retriever.load()
        return made


def only_here(method: str) -> bool:
    """Whether a method answers from long contexts alone."""
    return method in _ONLY_HERE


def choose(
    paths: Sequence[Path] | None,
    *,
    method: str,
    drafter: str | None,
    eta: float | None,
    gamma: int | None,
    retrieval_tokens: int | None,
    index: str | None,
    truncate_middle: bool,
    keep_prefix: Path | None,
    system: str | None,
) -> ContextChoice | None:
    """What the options describe; ``None`` where there is no long context.

    Raises:
        InputError: options of a long context were given without one.
    """
    if paths:
        return ContextChoice(
            tuple(paths),
            method,
            drafter,
            eta,
            gamma,
            retrieval_tokens,
            index,
            truncate_middle,
            keep_prefix,
            system,
        )
    given = {
        "--eta": eta,
        "--gamma": gamma,
        "--retrieval-tokens": retrieval_tokens,
        "--truncate-middle": truncate_middle or None,
        "--keep-prefix": None if keep_prefix is None else str(keep_prefix),
        "--method": method if only_here(method) else None,
    }
    for option, value in given.items():
        if value is not None:
            raise InputError(option, value, "it needs a long context; add --context FILE")
    return None


def read(choice: ContextChoice) -> ContextFiles:
    """The files.

    Raises:
        InputError: one of them cannot be read as text.
    """
    from specrag.retrieval.context_files import read_context

    try:
        return read_context(choice.paths)
    except InputError as error:
        raise InputError("--context", error.value, error.remedy) from None


def check_weights(model: str, dtype: str, device: str | None) -> None:
    """Refuse a model whose weights alone do not fit, before they are loaded.

    Raises:
        InputError: they do not.
    """
    from specrag.engine.memory import MemoryNeed, check_memory, free_bytes, weights_bytes
    from specrag.models.catalog import resolve
    from specrag.models.loading import DTYPES

    if dtype not in DTYPES or device not in (None, "cpu"):
        return
    files = resolve(model, progress=sys.stderr.isatty())
    need = MemoryNeed(weights_bytes(files.folder, dtype), 0, 0)
    check_memory(need, free_bytes("cpu"), model)


def answer(
    choice: ContextChoice,
    made: LongContext,
    files: ContextFiles,
    question: str,
    options: Options,
    colours: SourceColours | None,
    *,
    as_json: bool,
) -> None:
    """Show the answer as it comes, or print it for programs."""
    from specrag.cli.context_answers import describe_context, show_context

    if not as_json:
        show_context(made.stream(question, files.documents, **options), files.skipped, colours)
        return
    described = describe_context(made.answer(question, files.documents, **options), files.skipped)
    loaded = made.llm.loaded
    described |= {
        "context": [str(path) for path in choice.paths],
        "asked_method": choice.method,
        "drafter": choice.drafter,
        "eta": choice.eta,
        "gamma": choice.gamma,
        "model": loaded.name,
        "dtype": loaded.dtype,
        "device": loaded.device,
    }
    typer.echo(json.dumps(described, ensure_ascii=False))


def chat(made: LongContext, files: ContextFiles, first: str | None, options: Options) -> None:
    """Answer questions until the input ends; the documents are read once.

    An answer that fails costs neither the chat nor its history.
    """
    from specrag.cli.chat import next_question
    from specrag.cli.context_answers import show_context

    history: list[dict[str, str]] = []
    skipped = files.skipped
    question = first if first is not None else next_question()
    while question is not None:
        if question.strip():
            try:
                events = made.stream(question, files.documents, history=history, **options)
                answer = show_context(events, skipped)
            except SpecragError as error:
                typer.echo(f"error: {error}", err=True)
            else:
                skipped = ()  # said once
                history += [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer.text},
                ]
        question = next_question()
