"""How RaLMSpec and the sequential baselines are chosen for ``specrag ask``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from specrag.cli import common
from specrag.errors import InputError

if TYPE_CHECKING:
    from specrag.methods.base import DecodingMethod
    from specrag.methods.iterative import IterativeMethod
    from specrag.methods.ralm_prompt import SessionGenerator
    from specrag.methods.ralmspec import Stride as StrideChoice
    from specrag.methods.retriever import PassageRetriever

RALMSPEC = "ralmspec"
SEQUENTIAL = ("sequential", "sequential-kv-reuse")
METHODS = (RALMSPEC, *SEQUENTIAL)

_PANEL = "Iterative retrieval"

Method = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Passages found once: plain, respec, or a rival of it. A retrieval every 4 tokens: ralmspec, or the "
        "baselines sequential and sequential-kv-reuse. Several drafts, of which the best is chosen: speculative-rag.",
        rich_help_panel="Speculation",
    ),
]
Stride = Annotated[
    str | None,
    typer.Option(
        metavar="N|os3|cost-aware",
        help="Retrievals guessed before they are verified (the paper: 3); os3 chooses a number, cost-aware (default) "
        "decides guess by guess.",
        rich_help_panel=_PANEL,
    ),
]
Uncapped = Annotated[
    bool,
    typer.Option(
        "--uncapped", help="Let os3 believe match rates above the paper's 0.6.", rich_help_panel=_PANEL
    ),
]
Prefetch = Annotated[
    int | None,
    typer.Option(
        parser=common.integer,
        metavar="N",
        help="Passages that a search brings into the cache (default 20, or as many as there are).",
        rich_help_panel=_PANEL,
    ),
]
Asynchronous = Annotated[
    bool,
    typer.Option(
        "--asynchronous",
        help="Decode on while guesses are verified; cost-aware decides that by itself.",
        rich_help_panel=_PANEL,
    ),
]
Early = Annotated[
    bool,
    typer.Option(
        "--early", help="Show guessed text and take it back if it was wrong.", rich_help_panel=_PANEL
    ),
]
Decoder = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="How the tokens between two retrievals are decoded (default plain).",
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True, slots=True)
class Chosen:
    """A method that retrieves every few tokens, as the options describe it.

    Attributes:
        method: of :data:`METHODS`.
        stride, prefetch, asynchronous, uncapped, early: of RaLMSpec.
        decoder: a name.
    """

    method: str
    stride: StrideChoice
    prefetch: int | None
    asynchronous: bool
    uncapped: bool
    early: bool
    decoder: str

    def refuse(self, others: Mapping[str, object]) -> None:
        """Refuse options of standard RAG.

        Args:
            others: options by name, with what was given; ``None`` and ``False`` are nothing.

        Raises:
            InputError: one was given.
        """
        for option, value in others.items():
            if value is not None and value is not False:
                raise InputError(option, value, f"leave it out; --method {self.method} has no use for it")

    def check(self, retriever: PassageRetriever) -> None:
        """Check that there are as many passages as a search brings into the cache.

        Raises:
            InputError: there are fewer.
        """
        from specrag.methods.ralm_search import check_prefetch

        check_prefetch(1 if self.prefetch is None else self.prefetch, len(retriever))

    def make(
        self,
        llm: SessionGenerator,
        retriever: PassageRetriever,
        decoder: str | DecodingMethod,
        system: str | None,
    ) -> IterativeMethod:
        """The method itself."""
        from specrag.methods.iterative_ralm import IterativeRaLM
        from specrag.methods.ralmspec import MAX_MATCH, RaLMSpec

        if self.method != RALMSPEC:
            reuse = self.method == "sequential-kv-reuse"
            return IterativeRaLM(llm, retriever, reuse=reuse, decoder=decoder, system=system)
        return RaLMSpec(
            llm,
            retriever,
            stride=self.stride,
            prefetch=self.prefetch,
            asynchronous=self.asynchronous,
            max_match=None if self.uncapped else MAX_MATCH,
            early=self.early,
            decoder=decoder,
            system=system,
        )


def choose(
    method: str,
    *,
    stride: str | None,
    prefetch: int | None,
    asynchronous: bool,
    uncapped: bool,
    early: bool,
    decoder: str | None,
    as_json: bool,
) -> Chosen | None:
    """What the options describe; ``None`` where passages are found once.

    Raises:
        InputError: they do not fit together.
    """
    speculative = {
        "--stride": stride,
        "--prefetch": prefetch,
        "--asynchronous": asynchronous or None,
        "--uncapped": uncapped or None,
        "--early": early or None,
    }
    if method != RALMSPEC:
        for option, value in speculative.items():
            if value is not None:
                raise InputError(option, value, f"only --method {RALMSPEC} guesses retrievals; add it")
    if method not in METHODS:
        if decoder is not None:
            raise InputError("--decoder", decoder, f"name it as --method, or add --method {RALMSPEC}")
        return None
    if uncapped and stride != "os3":
        raise InputError("--uncapped", uncapped, "only --stride os3 estimates a match rate; add it")
    if early and (as_json or not sys.stdout.isatty()):
        raise InputError("--early", early, "text can be taken back on a terminal only; leave it out")
    return Chosen(method, _stride(stride), prefetch, asynchronous, uncapped, early, decoder or "plain")


def _stride(text: str | None) -> StrideChoice:
    if text is None or text == "cost-aware":
        return "cost-aware"
    if text == "os3":
        return "os3"
    try:
        stride = int(text)
    except ValueError:
        stride = 0
    if stride < 1:
        raise InputError("--stride", text, "give a whole number of at least 1, os3 or cost-aware")
    return stride


def warm_up(retriever: PassageRetriever) -> None:
    """Read index and encoder and compile loops: what a server pays once is no part of an answer's time."""
    queries = retriever.encode(["warm-up"])
    for ranking in retriever.search(queries, 1):
        retriever.score(queries, ranking.ids)
