"""``specrag train questions`` and ``specrag train rationales``: what a RAG drafter is trained on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specrag.cli import common
from specrag.cli.train import app

if TYPE_CHECKING:
    from specrag.models.roles import TextGenerator
    from specrag.training.passage_pool import PassagePool
    from specrag.training.row_run import RowRun, Status

_WRITER = "qwen2.5-coder-1.5b"
_ROWS, _RUN, _MODEL = "Rows", "Run", "Model"
_LINE_SECONDS = 30.0


def _integer(panel: str, text: str) -> Any:
    return typer.Option(parser=common.integer, metavar="N", help=text, rich_help_panel=panel)


def _number(panel: str, text: str) -> Any:
    return typer.Option(parser=common.number, metavar="X", help=text, rich_help_panel=panel)


_Writer = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME|URL",
        help="Who writes: a chat model, or http://HOST:PORT/v1#MODEL.",
        rich_help_panel=_MODEL,
    ),
]
_Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder of the rows; made if need be.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")]
_Exclude = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="PATH",
        help="Keep no row that shares its question, or its answer with a passage, with this data set; may be "
        "repeated.",
    ),
]
_Batch = Annotated[int, _integer(_RUN, "Texts written side by side; a kill loses one batch.")]
_Seed = Annotated[int, _integer(_RUN, "Of everything random.")]


@app.command()
def questions(
    out: _Out,
    passages: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="JSON lines of title and text, also .gz; may be repeated."),
    ] = None,
    kb: Annotated[
        Path | None,
        typer.Option("--kb", metavar="DIR", help="Take the passages of a knowledge base instead."),
    ] = None,
    index: Annotated[
        str, typer.Option(metavar="NAME", help="Of --kb: what finds the passages beside the evidence.")
    ] = "bm25",
    rows: Annotated[int, _integer(_ROWS, "How many to make; a larger number later goes on.")] = 1000,
    exclude: _Exclude = None,
    row_passages: Annotated[int, _integer(_ROWS, "Passages of a row, its evidence included.")] = 10,
    choices: Annotated[float, _number(_ROWS, "Share of multiple choices.")] = 0.2,
    claims: Annotated[float, _number(_ROWS, "Share of claims to check.")] = 0.2,
    answer_words: Annotated[int, _integer(_ROWS, "Words of the longest answer.")] = 6,
    batch: _Batch = 16,
    seed: _Seed = 0,
    as_json: _Json = False,
    model: _Writer = _WRITER,
    dtype: common.Dtype = "int8",
    device: common.Device = None,
) -> None:
    """Make questions, choices and claims of passages, to train a RAG drafter on.

    A row keeps its passage as evidence, and others that its question finds and that do not hold the answer. A run
    that is stopped, or killed, goes on with the same command.

    Example: specrag train questions --passages wiki.jsonl --rows 1000 --out questions/
    """
    from specrag.training.evaluation_rows import EvaluationRows
    from specrag.training.questions import QuestionSettings, make_questions

    settings = QuestionSettings(
        rows=rows,
        passages=row_passages,
        choices=choices,
        claims=claims,
        answer_words=answer_words,
        batch=batch,
        seed=seed,
    )
    with ExitStack() as opened:
        pool = _pool(passages or [], kb, index, opened)
        evaluation = EvaluationRows(exclude) if exclude else None
        writer = _open_writer(model, dtype, device, opened)
        show = opened.enter_context(_progress())
        made = make_questions(
            writer, pool, out, settings, evaluation=evaluation, command=common.this_command(), show=show
        )
    if not as_json and len(made.rows) < rows:
        typer.echo(f"the passages are used up: {len(made.rows):,} of {rows:,} rows", err=True)
    _tell(made, as_json)


@app.command()
def rationales(
    rows: Annotated[
        list[Path],
        typer.Argument(metavar="ROWS...", help="Files of rows, or folders of specrag train questions."),
    ],
    out: _Out,
    exclude: _Exclude = None,
    passages: Annotated[
        int, _integer(_ROWS, "Most passages of a row; how many, and which beside the evidence, is drawn.")
    ] = 5,
    all_passages: Annotated[
        bool,
        typer.Option(
            "--all-passages",
            help="Show the writer all passages of a row, not the evidence alone: slower.",
            rich_help_panel=_ROWS,
        ),
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Keep a rationale only if the writer gives the answer from it alone.",
            rich_help_panel=_ROWS,
        ),
    ] = True,
    batch: _Batch = 16,
    seed: _Seed = 0,
    as_json: _Json = False,
    model: _Writer = _WRITER,
    dtype: common.Dtype = "int8",
    device: common.Device = None,
) -> None:
    """Let a strong model write a rationale for each row, and keep those from which the answer follows.

    A run that is stopped, or killed, goes on with the same command.

    Example: specrag train rationales questions/ --out rationales/
    """
    from specrag.training.drafter_rows import read_rows, without_evaluation
    from specrag.training.rationales import RationaleSettings, write_rationales

    settings = RationaleSettings(
        passages=passages, all_passages=all_passages, check=check, batch=batch, seed=seed
    )
    given = read_rows(rows)
    if exclude:
        kept = without_evaluation(given, exclude)
        given = list(kept.rows)
        typer.echo(
            f"left out: {kept.same_question:,} rows for their question, {kept.same_passage:,} for an answer with "
            "its passage",
            err=True,
        )
    with ExitStack() as opened:
        writer = _open_writer(model, dtype, device, opened)
        show = opened.enter_context(_progress())
        made = write_rationales(writer, given, out, settings, command=common.this_command(), show=show)
    _tell(made, as_json)


def _pool(passages: list[Path], kb: Path | None, index: str, opened: ExitStack) -> PassagePool:
    from specrag.errors import InputError
    from specrag.training.passage_pool import FilePassages, KnowledgeBasePassages

    if bool(passages) == (kb is not None):
        given = [str(path) for path in passages]
        raise InputError(
            "--passages", given, "give files of passages or a knowledge base with --kb, one of both"
        )
    if kb is None:
        return FilePassages(passages)
    from specrag.retrieval.knowledge_base import KnowledgeBase

    return KnowledgeBasePassages(opened.enter_context(KnowledgeBase.open(kb)), index)


def _open_writer(model: str, dtype: str, device: str | None, opened: ExitStack) -> TextGenerator:
    if model.startswith(("http://", "https://")):
        from specrag.models.endpoint import open_endpoint

        return opened.enter_context(open_endpoint(model))
    from specrag.language_model import load
    from specrag.methods.local_generator import LocalGenerator

    llm = load(model, dtype=dtype, device=device, progress=True)
    opened.callback(llm.close)
    return LocalGenerator(llm)


@contextmanager
def _progress() -> Iterator[Callable[[Status], None]]:
    """A progress bar on standard error; where that is no terminal, a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    said = -_LINE_SECONDS

    def say(status: Status) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= _LINE_SECONDS or status.done == status.total:
            said = now
            clock = time.strftime("%H:%M:%S")
            typer.echo(
                f"{clock} {status.stage}: {status.done:,} of {status.total:,} rows, {status.rejected:,} rejected",
                err=True,
            )

    try:
        if not console.is_terminal:
            yield say
            return
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("rows, {task.fields[rejected]} rejected"))
        with Progress(
            TextColumn("{task.description}"), *columns, TimeRemainingColumn(), console=console
        ) as bar:
            task = bar.add_task("", rejected=0, total=None)

            def show(status: Status) -> None:
                bar.update(
                    task,
                    description=status.stage,
                    completed=status.done,
                    total=status.total,
                    rejected=status.rejected,
                )

            yield show
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on", err=True)
        raise


def _tell(made: RowRun, as_json: bool) -> None:
    card = made.card
    if as_json:
        typer.echo(json.dumps({"out": str(made.out), **card}))
        return
    rate = card["rejection_rate"]
    typer.echo(
        f"rows:     {card['rows']:,}" + "".join(f", {n:,} {kind}" for kind, n in card["kinds"].items())
    )
    typer.echo(f"rejected: {card['rejected']:,}" + ("" if rate is None else f" ({rate:.1%})"))
    for reason, count in card["reasons"].items():
        typer.echo(f"  {count:6,}  {reason}")
    if card["rows_per_hour"] is not None:
        typer.echo(f"rate:     {card['rows_per_hour']:,.0f} rows an hour")
    typer.echo(f"written:  {made.out}")
