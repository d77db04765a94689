"""``specrag search QUERY --kb DIR``: passages with their scores."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specrag.cli import common
from specrag.cli.printable import printable

if TYPE_CHECKING:
    from specrag.retrieval.passage import Hit

_SNIPPET = 300  # characters
_DEFAULT_K = 5


def search(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What to look for.")],
    kb: Annotated[Path, typer.Option(metavar="DIR", help="A folder made by specrag index.")],
    k: Annotated[
        int | None,
        typer.Option("-k", parser=common.integer, metavar="N", help="How many hits; by default 5."),
    ] = None,
    index: Annotated[str, typer.Option(metavar="NAME", help="flat, hnsw, bm25 or hybrid.")] = "hybrid",
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Such as year>=2000 or src=a,b; may be repeated, all must agree.",
        ),
    ] = None,
    rerank: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A cross-encoder that orders the best hits anew."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")] = False,
) -> None:
    """Search a knowledge base.

    Example: specrag search "How is copper made?" --kb kb/ -k 3 --where "year>=2000"
    """
    from specrag.retrieval.filters import parse_conditions
    from specrag.retrieval.knowledge_base import KnowledgeBase, check_index, check_queries

    # All that can be wrong is said before the encoder is loaded.
    check_queries([query])
    check_index(index)
    conditions = parse_conditions(where or ())
    started = time.perf_counter()
    with KnowledgeBase.open(kb) as base:
        wanted = min(_DEFAULT_K, len(base)) if k is None else k
        base.check_k(wanted)
        base.allowed(conditions)
        reranker = None
        if rerank is not None:
            from specrag.retrieval.reranker import load_reranker

            reranker = load_reranker(rerank)
        # What a server pays once: index and encoder are read, loops compiled, memory mapped.
        base.search(["warm-up"], 1, index=index, reranker=reranker)
        loaded = time.perf_counter()
        hits = base.search([query], wanted, index=index, where=conditions, reranker=reranker)[0]
        ended = time.perf_counter()
        passages = len(base)
    if as_json:
        description = {
            "query": query,
            "index": index,
            "passages": passages,
            "hits": [_describe(rank, hit) for rank, hit in enumerate(hits, start=1)],
            "load_seconds": loaded - started,
            "search_seconds": ended - loaded,
        }
        typer.echo(json.dumps(description, ensure_ascii=False))
        return
    _print_hits(hits)
    milliseconds = 1000 * (ended - loaded)
    _print_status(
        f"{len(hits)} of {passages:,} passages, {index}: search {milliseconds:.1f} ms, "
        f"after {loaded - started:.1f} s of loading"
    )


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


def _print_hits(hits: Sequence[Hit]) -> None:
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
        lines = textwrap.wrap(_snippet(passage.text), max(console.width, 20) - len(indent))
        console.print(Text("\n".join(indent + line for line in lines)), soft_wrap=True)


def _snippet(text: str) -> str:
    """The beginning of a passage on one line, cut at a word."""
    line = printable(text)
    if len(line) <= _SNIPPET:
        return line
    cut = line[:_SNIPPET].rsplit(" ", 1)[0]
    return f"{cut} ..."


def _print_status(line: str) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text(line, style="dim"), soft_wrap=True)
