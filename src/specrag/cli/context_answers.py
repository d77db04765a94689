"""How ``specrag ask --context`` shows an answer: the text as it comes, the chunks that were read, a line of figures."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from specrag.cli.printable import printable
from specrag.cli.speculation import legend
from specrag.cli.streaming import show

if TYPE_CHECKING:
    from specrag.cli.speculation import SourceColours
    from specrag.methods.long_context_result import ContextAnswer, ContextReading
    from specrag.retrieval.context_settings import ScoredChunk
    from specrag.retrieval.files import Skipped
    from specrag.speculation.decode import Step


def show_context(
    events: Generator[ContextReading | Step, None, ContextAnswer],
    skipped: Sequence[Skipped] = (),
    colours: SourceColours | None = None,
) -> ContextAnswer:
    """Write the text as it comes, then the chunks, then notes and figures."""
    from rich.console import Console

    answer = show(events, colours)
    _show_chunks(answer)
    console = Console(stderr=True, highlight=False)
    for note in _notes(answer, skipped):
        console.print(f"note: {note}", style="yellow", soft_wrap=True, markup=False)
    if colours is not None:
        console.print(legend(answer.generation.usage), soft_wrap=True)
    console.print(_figures(answer), style="dim", soft_wrap=True, markup=False)
    return answer


def describe_context(answer: ContextAnswer, skipped: Sequence[Skipped] = ()) -> dict[str, object]:
    """An answer for programs."""
    from specrag.engine.memory import peak_bytes

    reading, stats, usage = answer.reading, answer.stats, answer.generation.usage
    part = reading.part
    return {
        "question": reading.question,
        "answer": answer.text,
        "method": reading.method,
        "fallback": reading.fallback,
        "chunks": [_describe_chunk(scored) for scored in reading.chunks],
        "part": None
        if part is None
        else {
            "tokens": part.tokens,
            "budget": part.budget,
            "context_tokens": part.context_tokens,
            "context_chunks": part.context_chunks,
            "below_threshold": part.below_threshold,
            "whole": part.whole,
        },
        "left_out_tokens": reading.left_out_tokens,
        "skipped": [asdict(entry) for entry in skipped],
        "prefix_note": answer.prefix_note,
        "finish_reason": answer.generation.finish_reason,
        "usage": {
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "drafter_tokens": stats.drafter_tokens,
            "completion_tokens": stats.completion_tokens,
            "passes": usage.passes,
            "drafted_by": dict(usage.drafted_by),
            "accepted_by": dict(usage.accepted_by),
            "acceptance": usage.acceptance,
        },
        "timing": {
            **{name: value for name, value in asdict(stats).items() if name.endswith("_seconds")},
            "total_seconds": stats.total_seconds,
            "tokens_per_second": stats.tokens_per_second,
        },
        "memory": {
            **{f"{name}_bytes": value for name, value in asdict(reading.memory).items()},
            "estimated_bytes": reading.memory.total,
            "peak_bytes": peak_bytes(),
        },
    }


def _describe_chunk(scored: ScoredChunk) -> dict[str, object]:
    chunk = scored.chunk
    return {
        "number": scored.number,
        "source": chunk.source,
        "title": chunk.title,
        "place": chunk.place,
        "tokens": chunk.tokens,
        "score": scored.score,
        "text": chunk.text,
    }


def _show_chunks(answer: ContextAnswer) -> None:
    from rich.console import Console
    from rich.text import Text

    part = answer.reading.part
    if part is None or answer.reading.fallback:
        return
    reads = "the drafter read" if answer.reading.drafter_tokens else "the model read"
    if answer.reading.drafter_tokens and not answer.stats.drafter_tokens:
        reads = "the drafter was never asked; it would have read"
    console = Console(highlight=False)
    console.print()
    console.print(
        f"{reads} {len(part.chunks)} of {part.context_chunks} chunks, "
        f"{part.tokens:,} of {part.context_tokens:,} tokens:",
        style="dim",
        soft_wrap=True,
    )
    for scored in part.chunks:
        chunk = scored.chunk
        line = Text(printable(chunk.title or chunk.source))
        where = ", ".join(printable(text) for text in (chunk.source, chunk.place) if text)
        line.append(f"  {where}  score {scored.score:.2f}", style="dim")
        console.print(line, soft_wrap=True)


def _notes(answer: ContextAnswer, skipped: Sequence[Skipped]) -> list[str]:
    """What a reader should know before trusting the answer or the figures."""
    reading = answer.reading
    notes = [f"not read: {printable(entry.source)}: {printable(entry.reason)}" for entry in skipped]
    if reading.left_out_tokens:
        notes.append(
            f"{reading.left_out_tokens:,} tokens of the middle were left out, since they did not fit"
        )
    if reading.fallback:
        notes.append(reading.fallback)
    elif reading.part is not None and reading.part.below_threshold:
        notes.append("no chunk resembles the question; the most similar one was read")
    if answer.prefix_note:
        notes.append(answer.prefix_note)
    return notes


def _figures(answer: ContextAnswer) -> str:
    stats, usage = answer.stats, answer.generation.usage
    times = [f"prefill {stats.prefill_seconds:.2f} s", f"decoding {stats.decode_seconds:.2f} s"]
    if stats.drafter_tokens:
        times.insert(1, f"drafter's prefill {stats.drafter_prefill_seconds:.2f} s")
    if answer.reading.part is not None:
        times.insert(0, f"retrieval {stats.retrieval_seconds:.2f} s")
    if stats.prefix_seconds:
        times.append(f"kept prefix {stats.prefix_seconds:.2f} s")
    count = stats.completion_tokens
    parts = [
        f"{count} token{'' if count == 1 else 's'}, {stats.tokens_per_second:.1f} tokens/s",
        f"{stats.prompt_tokens:,} tokens read"
        + (f", {stats.cached_tokens:,} of them known before" if stats.cached_tokens else ""),
        ", ".join(times),
    ]
    if usage.drafted:
        parts.append(
            f"{usage.mean_accepted_tokens:.2f} tokens a pass, "
            f"{usage.accepted} of {usage.drafted} guesses accepted"
        )
    if answer.generation.finish_reason == "length":
        parts.append("cut at the limit")
    return "; ".join(parts)
