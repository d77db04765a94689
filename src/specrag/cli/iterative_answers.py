"""How ``specrag ask`` shows an answer written with a retrieval every few tokens."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict
from typing import TYPE_CHECKING

from specrag.cli.answers import describe_source, show_sources
from specrag.cli.speculation import SourceColours, legend
from specrag.cli.streaming import show

if TYPE_CHECKING:
    from specrag.methods.ralm_result import IterativeAnswer, Retraction
    from specrag.speculation.decode import Step


def show_iterative(
    events: Generator[Step | Retraction, None, IterativeAnswer],
    colours: SourceColours | None = None,
    *,
    early: bool = False,
) -> IterativeAnswer:
    """Write the text as it comes, then the sources, then the figures."""
    from rich.console import Console

    answer = _show_early(events) if early else show(events, colours)
    show_sources(answer.sources)
    if answer.failure is not None:
        note = f"note: written on without the knowledge base, which failed ({answer.failure})"
        Console(stderr=True, highlight=False).print(note, style="yellow", soft_wrap=True, markup=False)
    if colours is not None:
        Console(stderr=True).print(legend(answer.usage), soft_wrap=True)
    _show_figures(answer)
    return answer


def describe_iterative(question: str, answer: IterativeAnswer) -> dict[str, object]:
    """An answer for programs."""
    timing = answer.timing
    return {
        "question": question,
        "answer": answer.text,
        "tokens": [token.token for token in answer.tokens],
        "finish_reason": answer.finish_reason,
        "sources": [describe_source(source) for source in answer.sources],
        "chunks": [asdict(chunk) for chunk in answer.chunks],
        "rounds": [asdict(round) for round in answer.rounds],
        "chunk_counts": asdict(answer.counts),
        "failure": answer.failure,
        "usage": {
            "prompt_tokens": answer.usage.prompt_tokens,
            "completion_tokens": answer.usage.completion_tokens,
            "drafted_by": dict(answer.usage.drafted_by),
            "accepted_by": dict(answer.usage.accepted_by),
        },
        "timing": {
            **{f"{name}_seconds": value for name, value in asdict(timing).items()},
            "generation_seconds": timing.generation,
            "retrieval_seconds": timing.retrieval,
            "tokens_per_second": answer.tokens_per_second,
        },
        "timeline": [asdict(span) for span in answer.timeline],
    }


def _show_early(events: Generator[Step | Retraction, None, IterativeAnswer]) -> IterativeAnswer:
    """Redraw the text whenever it grows or is taken back."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from specrag.methods.ralm_result import Retraction

    text = ""
    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                answer: IterativeAnswer = end.value
                return answer
            if isinstance(event, Retraction):
                text = text[: len(text) - len(event.text)]
            else:
                text += event.text
            live.update(Text(text), refresh=True)


def _show_figures(answer: IterativeAnswer) -> None:
    from rich.console import Console
    from rich.text import Text

    timing, count = answer.timing, answer.usage.completion_tokens
    parts = [
        f"{count} token{'s' if count != 1 else ''}, {answer.tokens_per_second:.1f} tokens/s",
        f"{len(answer.chunks)} retrieval{'s' if len(answer.chunks) != 1 else ''}",
        f"retrieval {timing.retrieval:.2f} s, prefill {timing.prefill:.2f} s, decoding {timing.decode:.2f} s",
    ]
    if answer.rounds:
        right = sum(round.matched for round in answer.rounds)
        wrong = sum(round.matched < round.stride for round in answer.rounds)
        parts.insert(2, f"{right} guessed right, {wrong} wrong")
    if answer.finish_reason == "length":
        parts.append("cut at the limit")
    Console(stderr=True).print(Text("; ".join(parts), style="dim"), soft_wrap=True)
