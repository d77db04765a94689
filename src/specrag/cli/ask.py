"""``specrag ask QUESTION --kb DIR``: an answer from a knowledge base, with its sources."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specrag.cli import common, iterative, speculation
from specrag.cli.answers import describe_answer, show_answer
from specrag.cli.chat import run_chat
from specrag.cli.iterative_answers import describe_iterative, show_iterative
from specrag.errors import InputError

if TYPE_CHECKING:
    from specrag.language_model import LanguageModel
    from specrag.methods.options import Options
    from specrag.methods.standard_rag import StandardRAG
    from specrag.retrieval.reranker import Reranker

_RETRIEVAL = "Retrieval"
_SAMPLING = "Sampling"
_DEFAULT_K = 5


def ask(
    kb: Annotated[Path, typer.Option("--kb", metavar="DIR", help="A folder made by specrag index.")],
    question: Annotated[
        str | None, typer.Argument(metavar="QUESTION", help="What to ask; by default standard input.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask again and again; follow-up questions are understood.")
    ] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            parser=common.integer,
            metavar="N",
            help="At most this many tokens (default 256; 128 with a retrieval every 4 tokens).",
            show_default=False,
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A system message in front of the conversation.")
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", "-f", metavar="PATH", help="A file with the question; - is stdin.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(parser=common.number, metavar="SECONDS", help="End with an error after this time."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end in place of the text.")
    ] = False,
    k: Annotated[
        int | None,
        typer.Option(
            "-k",
            parser=common.integer,
            metavar="N",
            help="How many passages; by default 5.",
            rich_help_panel=_RETRIEVAL,
        ),
    ] = None,
    index: Annotated[
        str,
        typer.Option(metavar="NAME", help="flat, hnsw, bm25 or hybrid.", rich_help_panel=_RETRIEVAL),
    ] = "hybrid",
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Such as year>=2000 or title=A,B; may be repeated.",
            rich_help_panel=_RETRIEVAL,
        ),
    ] = None,
    rerank: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Order the passages anew by this cross-encoder.", rich_help_panel=_RETRIEVAL
        ),
    ] = None,
    min_score: Annotated[
        float | None,
        typer.Option(
            parser=common.number,
            metavar="X",
            help="Do not answer where no passage has this cosine similarity (default 0.4).",
            rich_help_panel=_RETRIEVAL,
            show_default=False,
        ),
    ] = None,
    no_abstain: Annotated[
        bool, typer.Option("--no-abstain", help="Answer whatever is found.", rich_help_panel=_RETRIEVAL)
    ] = False,
    no_rewrite: Annotated[
        bool,
        typer.Option(
            "--no-rewrite", help="Search for follow-up questions as they are.", rich_help_panel=_RETRIEVAL
        ),
    ] = False,
    temperature: Annotated[
        float,
        typer.Option(
            parser=common.number, metavar="X", help="0: the likeliest token.", rich_help_panel=_SAMPLING
        ),
    ] = 0.0,
    top_k: Annotated[
        int,
        typer.Option(
            parser=common.integer, metavar="N", help="Draw among N tokens; 0: all.", rich_help_panel=_SAMPLING
        ),
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            parser=common.number,
            metavar="X",
            help="Draw among the likeliest tokens that hold this probability.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 1.0,
    seed: Annotated[
        int,
        typer.Option(
            parser=common.integer,
            metavar="N",
            help="The same seed gives the same text.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0,
    method: iterative.Method = "plain",
    stride: iterative.Stride = None,
    uncapped: iterative.Uncapped = False,
    prefetch: iterative.Prefetch = None,
    asynchronous: iterative.Asynchronous = False,
    early: iterative.Early = False,
    decoder: iterative.Decoder = None,
    drafter: speculation.Drafter = None,
    relaxed: speculation.Relaxed = False,
    tolerance: speculation.Tolerance = 3.0,
    show_sources: speculation.ShowSources = False,
    model: common.Model = "smollm2-135m",
    dtype: common.Dtype = "bf16",
    device: common.Device = None,
    adapter: common.Adapter = None,
    batch_invariant: common.BatchInvariant = False,
) -> None:
    """Answer a question from a knowledge base, citing its passages.

    Example: specrag ask "Who discovered radium?" --kb notes-kb
    """
    from specrag.language_model import load
    from specrag.methods.options import check_options
    from specrag.methods.standard_rag import MIN_SCORE, StandardRAG, check_min_score
    from specrag.retrieval.filters import parse_conditions
    from specrag.retrieval.knowledge_base import KnowledgeBase, check_index

    chosen = iterative.choose(
        method,
        stride=stride,
        prefetch=prefetch,
        asynchronous=asynchronous,
        uncapped=uncapped,
        early=early,
        decoder=decoder,
        as_json=as_json,
    )
    if chosen is not None:
        chosen.refuse(
            {
                "--chat": chat,
                "-k": k,
                "--rerank": rerank,
                "--min-score": min_score,
                "--no-abstain": no_abstain,
                "--no-rewrite": no_rewrite,
            }
        )
    decoding = speculation.method_of(chosen.decoder if chosen else method, drafter, relaxed, tolerance)
    options: Options = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
    }
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if timeout is not None:
        options["timeout"] = timeout
    # All that can be wrong without the model is said before it is fetched and loaded.
    check_options({**options, "method": decoding})
    check_index(index)
    threshold = _threshold(MIN_SCORE, min_score, no_abstain)
    check_min_score(threshold)
    words = _first_question(question, file, chat, as_json)
    conditions = parse_conditions(where or ())
    with KnowledgeBase.open(kb) as base:
        wanted = min(_DEFAULT_K, len(base)) if k is None else k
        base.check_k(wanted)
        base.allowed(conditions)
        retriever = chosen.retriever(base, index, conditions) if chosen is not None else None
        llm = load(
            model,
            dtype=dtype,
            device=device,
            adapter=adapter,
            batch_invariant=batch_invariant,
            progress=sys.stderr.isatty(),
        )
        colours = _colours(llm, show_sources)
        if chosen is not None and retriever is not None:
            assert words is not None
            iterating = chosen.make(llm, retriever, decoding, system)
            iterating.check(words, **options)
            iterative.warm_up(retriever)
            if not as_json:
                show_iterative(iterating.stream(words, **options), colours, early=early)
                return
            described = describe_iterative(words, iterating.answer(words, **options))
            _print_json(described | {"method": method, "decoder": chosen.decoder, "index": index}, llm)
            return
        options["method"] = decoding
        rag = StandardRAG(
            llm,
            base,
            k=wanted,
            index=index,
            where=conditions,
            reranker=_load_reranker(rerank),
            min_score=threshold,
            system=system,
            rewrite=not no_rewrite,
        )
        if words is not None:
            rag.check(words, **options)
        _warm_up(rag)
        if chat:
            run_chat(rag, words, options)
            return
        assert words is not None
        if not as_json:
            show_answer(rag.stream(words, **options), colours)
            return
        described = describe_answer(words, rag.answer(words, **options))
        found = {"method": method, "index": index, "k": wanted, "min_score": threshold}
        _print_json(described | found, llm)


def _print_json(described: dict[str, object], llm: LanguageModel) -> None:
    loaded = llm.loaded
    described |= {"model": loaded.name, "dtype": loaded.dtype, "device": loaded.device}
    typer.echo(json.dumps(described, ensure_ascii=False))


def _colours(llm: LanguageModel, wanted: bool) -> speculation.SourceColours | None:
    from specrag.models.tokenizer import TextStream

    return speculation.SourceColours(TextStream(llm.tokenizer)) if wanted else None


def _threshold(default: float, given: float | None, no_abstain: bool) -> float | None:
    if no_abstain and given is not None:
        raise InputError("--min-score", given, "give --min-score or --no-abstain, not both")
    if no_abstain:
        return None
    return default if given is None else given


def _first_question(question: str | None, file: str | None, chat: bool, as_json: bool) -> str | None:
    """The question; ``None`` for a chat that begins with the first line of standard input."""
    if not chat:
        return common.read_prompt(question, file, raw=False)
    if as_json:
        raise InputError("--json", True, "a chat is for people; leave out --chat")
    if file is not None:
        raise InputError("--file", file, "a chat reads its questions from standard input; leave out --file")
    return None if question is None else common.read_prompt(question, None, raw=False)


def _load_reranker(name: str | None) -> Reranker | None:
    if name is None:
        return None
    from specrag.retrieval.reranker import load_reranker

    return load_reranker(name)


def _warm_up(rag: StandardRAG) -> None:
    """Read index and encoder and compile loops: what a server pays once is no part of an answer's time."""
    rag.knowledge_base.search(["warm-up"], 1, index=rag.index, reranker=rag.reranker)
