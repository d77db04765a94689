"""How ``specrag ask`` shows an answer: the text as it comes, its sources, and a line of figures."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from specrag.cli.printable import printable
from specrag.cli.speculation import legend
from specrag.cli.streaming import show

if TYPE_CHECKING:
    from specrag.cli.speculation import SourceColours
    from specrag.methods.answer import Answer, Source, Sources
    from specrag.speculation.decode import Step


def show_answer(
    events: Generator[Sources | Step, None, Answer], colours: SourceColours | None = None
) -> Answer:
    """Write the text as it comes, then the sources, then the figures; end the line also where an error cuts it."""
    from rich.console import Console

    answer = show(events, colours)
    _show_sources(answer)
    _show_notes(answer)
    if colours is not None and answer.generation is not None:
        Console(stderr=True).print(legend(answer.generation.usage), soft_wrap=True)
    _show_figures(answer)
    return answer


def describe_answer(question: str, answer: Answer) -> dict[str, object]:
    """An answer for programs."""
    generation, stats = answer.generation, answer.stats
    return {
        "question": question,
        "searched_with": answer.question,
        "answer": answer.text,
        "abstained": answer.abstained,
        "sources": [describe_source(source) for source in answer.sources],
        "citations": [
            asdict(citation) | {"supported": citation.supported} for citation in answer.citations.found
        ],
        "invalid_citations": list(answer.citations.invalid),
        "left_out": len(answer.left_out),
        "shortened": answer.shortened,
        "finish_reason": None if generation is None else generation.finish_reason,
        "usage": {"prompt_tokens": stats.prompt_tokens, "completion_tokens": stats.completion_tokens},
        "timing": {
            "rewrite_seconds": stats.rewrite_seconds,
            "retrieval_seconds": stats.retrieval_seconds,
            "prefill_seconds": stats.prefill_seconds,
            "decode_seconds": stats.decode_seconds,
            "tokens_per_second": stats.tokens_per_second,
        },
    }


def describe_source(source: Source) -> dict[str, object]:
    """A source for programs."""
    passage = source.passage
    return {
        "number": source.number,
        "title": passage.title,
        "source": passage.source,
        "place": passage.place,
        "text": passage.text,
        "metadata": dict(passage.metadata),
        "score": source.score,
        "similarity": source.similarity,
        "cited": source.cited,
        "support": source.support,
    }


def _show_sources(answer: Answer) -> None:
    if not answer.abstained:
        show_sources(answer.sources)


def show_sources(sources: Sequence[Source], mark: str = "cited") -> None:
    """A line for each source behind an empty line; nothing where there is none.

    Args:
        mark: what is said of those that are cited.
    """
    from rich.console import Console
    from rich.text import Text

    if not sources:
        return
    console = Console(highlight=False)
    console.print()
    for source in sources:
        passage = source.passage
        where = ", ".join(printable(part) for part in (passage.source, passage.place) if part)
        line = Text()
        line.append(f"[{source.number}] ", style="bold" if source.cited else "dim")
        line.append(f"{printable(passage.title or passage.source)}  ", style="bold" if source.cited else "")
        line.append(f"{where}  score {source.score:.3g}", style="dim")
        if source.cited:
            line.append("  ", style="dim").append(mark, style="green")
        console.print(line, soft_wrap=True)


def _show_notes(answer: Answer) -> None:
    """What a reader should know before trusting the answer, on standard error."""
    from rich.console import Console

    notes = []
    if answer.abstained and answer.sources:
        best = max(source.similarity or 0.0 for source in answer.sources)
        notes.append(
            f"the most similar passage has a similarity of {best:.2f}; --no-abstain answers all the same"
        )
    if answer.citations.invalid:
        numbers = ", ".join(f"[{number}]" for number in answer.citations.invalid)
        notes.append(f"the answer cites {numbers}, which is no source")
    for citation in answer.citations.unsupported:
        notes.append(f"[{citation.number}] holds little of what it is cited for: {citation.sentence}")
    if answer.shortened:
        notes.append("the best passage was shortened to fit the prompt")
    if answer.left_out:
        passages = "1 passage" if len(answer.left_out) == 1 else f"{len(answer.left_out)} passages"
        notes.append(f"{passages} left out, since the prompt was full")
    console = Console(stderr=True, highlight=False)
    for note in notes:
        console.print(f"note: {note}", style="yellow", soft_wrap=True, markup=False)


def _show_figures(answer: Answer) -> None:
    from rich.console import Console
    from rich.text import Text

    stats = answer.stats
    times = f"retrieval {stats.retrieval_seconds:.2f} s"
    if stats.rewrite_seconds >= 0.005:
        times = f"rewriting {stats.rewrite_seconds:.2f} s, {times}"
    parts = [times]
    if answer.generation is not None:
        tokens = f"{stats.completion_tokens} token{'s' if stats.completion_tokens != 1 else ''}"
        parts = [
            f"{tokens}, {stats.tokens_per_second:.1f} tokens/s",
            f"{times}, prefill {stats.prefill_seconds:.2f} s, decoding {stats.decode_seconds:.2f} s",
        ]
        usage = answer.generation.usage
        if usage.drafted:
            parts.append(
                f"{usage.mean_accepted_tokens:.2f} tokens a pass, "
                f"{usage.accepted} of {usage.drafted} guesses accepted"
            )
        if answer.generation.finish_reason == "length":
            parts.append("cut at the limit")
    Console(stderr=True).print(Text("; ".join(parts), style="dim"), soft_wrap=True)
