"""The demonstration: a knowledge base of Wikipedia summaries, three questions, streamed and cited answers, a table.

Everything is fetched and built once; afterwards it takes seconds. Run it with `make demo`.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from scripts.sample_data import ATTRIBUTION, wikipedia_summaries
from specrag import KnowledgeBase, LanguageModel, Result, Step, load
from specrag.errors import SpecragError
from specrag.retrieval import progress as building
from specrag.retrieval.build import build

MODEL = "smollm2-135m"
FOLDER = Path("build/demo/wikipedia")
QUESTIONS = (
    "Who discovered radium?",
    "Which sea does the river Nile flow into?",
    "What did Alexander Fleming discover?",
)


@dataclass(frozen=True, slots=True)
class Answered:
    """One row of the table."""

    question: str
    answer: Result


def open_knowledge_base(folder: Path, console: Console) -> KnowledgeBase:
    """The knowledge base in ``folder``, brought up to date; seconds where nothing has changed."""
    if not console.is_terminal and not folder.exists():  # where no bar is shown
        console.print("Fetching and building a knowledge base: some three minutes, once.")
    summaries = wikipedia_summaries(progress=console.is_terminal)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("knowledge base", total=None)

        def show(state: building.Progress) -> None:
            label = f"knowledge base: {state.stage}"
            bar.update(task, description=label, completed=state.done, total=state.total)

        report = build([summaries], folder, progress=show)
    made = f"built in {report.seconds:.0f} s" if report.encoded else "there already"
    console.print(f"Knowledge base: {report.passages:,} passages, {made} ({ATTRIBUTION})")
    return KnowledgeBase.open(folder)


def ask(llm: LanguageModel, kb: KnowledgeBase, question: str, console: Console) -> Answered:
    """Show the answer as it comes."""
    console.print(f"\n> {question}", style="bold", markup=False)
    events = llm.stream(question, kb=kb, k=3, max_tokens=64)
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            sys.stdout.write("\n")
            return Answered(question, end.value)
        if isinstance(event, Step):
            sys.stdout.write(event.text)
            sys.stdout.flush()


def table(rows: list[Answered]) -> Table:
    """What was asked, answered, cited, and how long each part took."""
    shown = Table(show_lines=True)
    for name in ("question", "answer", "sources (cited: *)"):
        shown.add_column(name, overflow="fold")
    shown.add_column("times", no_wrap=True)
    for row in rows:
        timing = row.answer.timing
        sources = "\n".join(
            f"{'*' if source.cited else ' '}{source.number} {source.passage.title}"
            for source in row.answer.sources
        )
        shown.add_row(
            row.question,
            row.answer.text.replace("[", r"\["),
            sources,
            f"retrieval {timing.phases['retrieval']:.2f} s\nprefill   {timing.prefill:.2f} s\n"
            f"decoding  {timing.decode:.2f} s\n{row.answer.tokens_per_second:.0f} tokens/s",
        )
    return shown


def run(folder: Path, questions: tuple[str, ...], console: Console) -> None:
    """Fetch, build, ask, and sum up."""
    started = time.perf_counter()
    with open_knowledge_base(folder, console) as knowledge_base:
        llm: LanguageModel = load(MODEL, progress=console.is_terminal)
        knowledge_base.search(["warm-up"], 1)  # reads index and encoder, which a server does once
        rows = [ask(llm, knowledge_base, question, console) for question in questions]
    console.print()
    console.print(table(rows))
    console.print(f"All of it took {time.perf_counter() - started:.0f} s. Ask a question of your own:")
    console.print(f'  .venv/bin/specrag ask "What is bronze made of?" --kb {folder}', markup=False)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Answer questions from 10,033 Wikipedia summaries.")
    parser.add_argument("questions", nargs="*", default=QUESTIONS, help="other questions")
    parser.add_argument("--kb", type=Path, default=FOLDER, help=f"the folder to build in (default {FOLDER})")
    arguments = parser.parse_args()
    try:
        run(arguments.kb, tuple(arguments.questions), Console(highlight=False))
    except SpecragError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
