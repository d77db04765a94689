"""``specrag search QUERY --kb DIR``: passages with their scores, from a folder or from a store such as PostgreSQL."""

from __future__ import annotations

import json
import re
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specrag.cli import common, configuration, store
from specrag.cli.printable import printable
from specrag.errors import InputError

if TYPE_CHECKING:
    from specrag.retrieval import Hit
    from specrag.retrieval.encoder import Reranker
    from specrag.retrieval.index import Filter

_SNIPPET = 300  # characters
_LEAD = 60  # of them before the first matching word
_WORD = re.compile(r"\w+")
_DEFAULT_K = 5


def search(
    line: typer.Context,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What to look for.")],
    kb: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="A folder made by specrag index, or the address of a store."),
    ] = None,
    k: Annotated[
        int | None,
        typer.Option("-k", parser=common.integer, metavar="N", help="How many hits; by default 5."),
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="flat, hnsw, bm25 or hybrid (the default); of a store flat (the default) or hnsw.",
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help='Such as "year>=2000 and not src=a,b"; may be repeated, all must agree.',
        ),
    ] = None,
    rerank: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A cross-encoder that orders the best hits anew."),
    ] = None,
    pgvector: store.Url = None,
    table: store.Table = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")] = False,
) -> None:
    """Search a knowledge base, in a folder or in a store.

    Example: specrag search "How is copper made?" --kb kb/ -k 3 --where "year>=2000"
    """
    from specrag.retrieval import check_index, check_queries
    from specrag.retrieval.index import read_filter
    from specrag.retrieval.stores import is_address

    # Everything is checked before the encoder is loaded.
    check_queries([query])
    address = store.table_address(pgvector, table)
    if address is not None and kb is not None and configuration.is_from_file(line, "kb"):
        kb = None
    if address is not None and kb is not None:
        raise InputError("--kb", str(kb), "give a knowledge base or a table of PostgreSQL, not both")
    if kb is None and address is None:
        raise typer.BadParameter("name a knowledge base with --kb, or a --table of PostgreSQL")
    if kb is not None and is_address(kb):
        kb, address = None, kb
    conditions = read_filter(where)
    if kb is not None:
        index = "hybrid" if index is None else index
        check_index(index)
        outcome = _search_folder(_SearchRequest(query, k, conditions, rerank), Path(kb), index)
    else:
        assert address is not None
        index = "flat" if index is None else index
        outcome = _search_store(_SearchRequest(query, k, conditions, rerank), address, index)
    if as_json:
        description = {
            "query": query,
            "index": index,
            "passages": outcome.passages,
            "hits": [_describe(rank, hit) for rank, hit in enumerate(outcome.hits, start=1)],
            "load_seconds": outcome.load_seconds,
            "search_seconds": outcome.search_seconds,
            "missing_shards": list(outcome.missing),
        }
        typer.echo(json.dumps(description, ensure_ascii=False))
        return
    _print_hits(outcome.hits, query)
    _print_status(
        f"{len(outcome.hits)} of {outcome.passages:,} passages, {index}: search "
        f"{1000 * outcome.search_seconds:.1f} ms, after {outcome.load_seconds:.1f} s of loading"
    )
    for name in outcome.missing:
        _print_status(f"partial: {name} did not answer")


@dataclass(frozen=True)
class _SearchRequest:
    """What is looked for."""

    query: str
    k: int | None
    where: Filter | None
    rerank: str | None

    def wanted(self, passages: int) -> int:
        return min(_DEFAULT_K, passages) if self.k is None else self.k

    def reranker(self) -> Reranker | None:
        if self.rerank is None:
            return None
        from specrag.retrieval.encoder import load_reranker

        return load_reranker(self.rerank)


@dataclass(frozen=True)
class _Outcome:
    """The hits, the number of passages searched, and the time that it took."""

    hits: Sequence[Hit]
    passages: int
    load_seconds: float
    search_seconds: float
    missing: tuple[str, ...] = ()


def _search_folder(request: _SearchRequest, kb: Path, index: str) -> _Outcome:
    from specrag.retrieval import KnowledgeBase

    started = time.perf_counter()
    with KnowledgeBase.open(kb) as base:
        wanted = request.wanted(len(base))
        base.check_k(wanted)
        base.allowed(request.where)
        reranker = request.reranker()
        # Costs that a server pays once: reading index and encoder, compiling loops, mapping memory.
        base.search(["warm-up"], 1, index=index, reranker=reranker)
        loaded = time.perf_counter()
        hits = base.search([request.query], wanted, index=index, where=request.where, reranker=reranker)[0]
        return _Outcome(hits, len(base), loaded - started, time.perf_counter() - loaded)


def _search_store(request: _SearchRequest, address: str, index: str) -> _Outcome:
    from specrag.retrieval.index import HnswSettings
    from specrag.retrieval.stores import QuestionSearch, open_store

    started = time.perf_counter()
    began = time.monotonic()
    # The walk over the graph must keep as many candidates as are asked for.
    breadth = max(HnswSettings().ef_search, request.k or 0) if index == "hnsw" else None
    with QuestionSearch(open_store(address, index=index, where=request.where, breadth=breadth)) as base:
        reranker = request.reranker()
        base.search(["warm-up"], 1, reranker=reranker)
        loaded = time.perf_counter()
        hits = base.search([request.query], request.wanted(len(base)), reranker=reranker)[0]
        missing = base.missing_since(began)
        return _Outcome(hits, len(base), loaded - started, time.perf_counter() - loaded, missing)


def _describe(rank: int, hit: Hit) -> dict[str, object]:
    passage = hit.passage
    return {
        "rank": rank,
        "id": passage.id,
        "score": hit.score,
        "title": passage.title,
        "place": passage.place,
        "source": passage.source,
        "text": passage.text,
        "metadata": dict(passage.metadata),
    }


def _print_hits(hits: Sequence[Hit], query: str) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for rank, hit in enumerate(hits, start=1):
        passage = hit.passage
        head = Text(f"{rank:>2}. ")
        head.append(f"{hit.score:.4f}  ", style="dim")
        head.append(printable(passage.title), style="bold")
        places = [printable(part) for part in (passage.place, passage.source) if part]
        head.append(f"  {', '.join(places)}", style="dim")
        console.print(head, soft_wrap=True)
        indent = " " * 4
        lines = textwrap.wrap(_snippet(passage.text, query), max(console.width, 20) - len(indent))
        body = Text("\n".join(indent + line for line in lines))
        for word in _matching(body.plain, query):
            body.stylize("bold", word.start(), word.end())
        console.print(body, soft_wrap=True)


def _matching(text: str, query: str) -> list[re.Match[str]]:
    """The words of a text that BM25 matches with a query: equal stems, no stop words."""
    from specrag.retrieval.index import BM25Settings

    settings = BM25Settings.of([text])
    wanted = set(settings.split_query(query))
    words = list(_WORD.finditer(text))
    return [word for word in words if wanted.intersection(settings.split_query(word[0]))]


def _snippet(text: str, query: str) -> str:
    """The part of a passage with the most matching words, the first of several; on one line, cut between words."""
    line = printable(text)
    if len(line) <= _SNIPPET:
        return line
    found = [word.start() for word in _matching(line, query)]

    def matches(start: int) -> int:
        return sum(start <= place < start + _SNIPPET - _LEAD for place in found)

    start = max([0, *(place for place in found if place >= _SNIPPET)], key=matches)
    start = line.rfind(" ", 0, max(start - _LEAD, 0)) + 1
    cut = line[start : start + _SNIPPET]
    before, after = "... " if start else "", ""
    if start + _SNIPPET < len(line):
        cut, after = cut.rsplit(" ", 1)[0], " ..."
    return f"{before}{cut}{after}"


def _print_status(line: str) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text(line, style="dim"), soft_wrap=True)
