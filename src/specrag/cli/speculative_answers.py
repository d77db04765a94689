"""How ``specrag ask`` shows an answer of Speculative RAG: the answer, its drafts as a table, and a line of figures."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from specrag.cli.answers import describe_source, show_sources
from specrag.cli.printable import printable

if TYPE_CHECKING:
    from rich.table import Table

    from specrag.methods.speculative_rag import Event
    from specrag.methods.speculative_result import Draft, SpeculativeAnswer

#: Of a draft that does not keep to the form.
_SHOWN_CHARACTERS = 120

#: A narrower terminal shows the score without its factors.
_WIDE = 76


def show_speculative(
    events: Generator[Event, None, SpeculativeAnswer], drafts: int, *, table: bool
) -> SpeculativeAnswer:
    """Tell how far the drafts are, on a terminal; then write the answer, its drafts, sources and figures.

    Args:
        drafts: how many are asked for.
        table: show the drafts.
    """
    from rich.console import Console

    answer = _wait(events, drafts)
    console = Console(highlight=False)
    console.print(printable(answer.text), soft_wrap=True, markup=False)
    if table and answer.drafts:
        console.print()
        console.print(_table(answer, console.width))
    if not answer.abstained:
        show_sources(answer.sources, mark="read for this answer")
    _show_notes(answer)
    _show_figures(answer)
    return answer


def describe_speculative(answer: SpeculativeAnswer) -> dict[str, object]:
    """An answer for programs, with everything that led to it."""
    sampling = answer.sampling
    return {
        "question": answer.question,
        "answer": answer.text,
        "best": answer.best,
        "abstained": answer.abstained,
        "fallback": answer.fallback,
        "malformed": answer.malformed,
        "drafts": [_describe_draft(draft) for draft in answer.drafts],
        "sources": [describe_source(source) for source in answer.sources],
        "sampling": None if sampling is None else asdict(sampling),
        "scoring": asdict(answer.scoring),
        "drafter": answer.drafter,
        "verifier": answer.verifier,
        "verifies_itself": answer.verifies_itself,
        "usage": asdict(answer.usage),
        "timing": {
            **{f"{name}_seconds": value for name, value in asdict(answer.timing).items()},
            "without_embedding_seconds": answer.timing.without_embedding,
        },
    }


def _describe_draft(draft: Draft) -> dict[str, Any]:
    described = asdict(draft)
    measured = draft.measured
    if measured is not None:
        described["measured"] = {
            name: None if part is None else {"log_prob": part.total, "tokens": part.count}
            for name, part in (
                ("rationale", measured.rationale),
                ("answer", measured.answer),
                ("self_contain", measured.self_contain),
                ("self_reflect", measured.self_reflect),
            )
        }
    return described


def _wait(events: Generator[Event, None, SpeculativeAnswer], drafts: int) -> SpeculativeAnswer:
    """Run to the end; a terminal shows how far the drafts are."""
    from rich.console import Console

    from specrag.methods.speculative_result import DraftDone, SubsetsDrawn

    console = Console(stderr=True)
    done = 0
    with console.status("searching") as status:
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                answer: SpeculativeAnswer = end.value
                return answer
            if isinstance(event, SubsetsDrawn):
                drafts = len(event.subsets)
                status.update(f"drafting, 0 of {drafts} done")
            elif isinstance(event, DraftDone):
                done += 1
                status.update("verifying" if done == drafts else f"drafting, {done} of {drafts} done")


def _table(answer: SpeculativeAnswer, width: int) -> Table:
    """The drafts, best first; the factors are log-probabilities in nats."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("from", max_width=8)
    table.add_column("answer, and its rationale", min_width=16, ratio=1)
    factors = [
        (name, attribute)
        for name, attribute in (
            ("drafter", "draft"),
            ("contain", "self_contain"),
            ("reflect", "self_reflect"),
        )
        if getattr(answer.scoring, attribute) and width >= _WIDE
    ]
    for name in (*(name for name, _ in factors), "score"):
        table.add_column(name, justify="right", no_wrap=True)
    for draft in answer.ranked:
        figures = [""] * (len(factors) + 1)
        if draft.scores is not None:
            figures = [f"{getattr(draft.scores, attribute):.2f}" for _, attribute in factors]
            figures.append(f"{draft.scores.total:.2f}")
        said, why = printable(draft.answer), printable(draft.rationale)
        if draft.malformed:
            said, why = f"malformed: {draft.malformed}", printable(draft.text)[:_SHOWN_CHARACTERS]
        best = draft.number == answer.best
        style = "bold" if best else "dim" if draft.malformed else ""
        text = Text(said, style=style).append(f"\n{why}" if why else "", style="not bold dim")
        numbers = " ".join(str(number) for number in draft.sources)
        cells = [Text(cell, style=style) for cell in (str(draft.number), numbers, *figures)]
        table.add_row(*cells[:2], text, *cells[2:])
    return table


def _show_notes(answer: SpeculativeAnswer) -> None:
    """What a reader should know before trusting the answer, on standard error."""
    from rich.console import Console

    notes = [*(answer.sampling.notes if answer.sampling is not None else ())]
    if answer.drafts and answer.verifies_itself:
        notes.append(
            f"one model, {answer.drafter}, drafted and verified; name a larger one with --verifier to choose better"
        )
    if answer.fallback is not None:
        notes.append(answer.fallback)
    elif answer.malformed:
        notes.append(f"{answer.malformed} of {len(answer.drafts)} drafts do not keep to the form")
    shortened = sum(draft.shortened for draft in answer.drafts)
    if shortened:
        notes.append(f"the passages of {shortened} drafts were shortened to fit the drafter's context")
    if answer.abstained and answer.sources:
        best = max(source.similarity or 0.0 for source in answer.sources)
        notes.append(
            f"the most similar passage has a similarity of {best:.2f}; --no-abstain answers all the same"
        )
    console = Console(stderr=True, highlight=False)
    for note in notes:
        console.print(f"note: {note}", style="yellow", soft_wrap=True, markup=False)


def _show_figures(answer: SpeculativeAnswer) -> None:
    from rich.console import Console
    from rich.text import Text

    timing, usage = answer.timing, answer.usage
    parts = [f"retrieval {timing.retrieval:.2f} s"]
    if answer.drafts:
        drafts = f"{len(answer.drafts)} draft{'s' if len(answer.drafts) != 1 else ''}"
        parts = [
            f"{drafts}, {timing.total:.2f} s",
            f"retrieval {timing.retrieval:.2f} s, embedding {timing.embedding:.2f} s, "
            f"clustering {timing.clustering:.2f} s, drafting {timing.drafting:.2f} s, "
            f"verification {timing.verification:.2f} s",
            f"the drafter read {usage.drafter_read_tokens:,} tokens and wrote "
            f"{usage.drafter_completion_tokens:,}, the verifier read {usage.verifier_read_tokens:,}",
        ]
    Console(stderr=True).print(Text("; ".join(parts), style="dim"), soft_wrap=True)
