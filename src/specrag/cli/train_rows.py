"""``specrag train questions`` and ``specrag train rationales``: make training rows for a RAG drafter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specrag.cli import common
from specrag.cli.train import Json, app, integer, number, progress_bar
from specrag.errors import InputError, SpecragError

if TYPE_CHECKING:
    from recipes.passages import PassagePool
    from recipes.rows import RowRun, Status
    from specrag.models import TextGenerator

_WRITER = "qwen2.5-coder-1.5b"
_ROWS, _RUN, _MODEL = "Rows", "Run", "Model"


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
_Exclude = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="PATH",
        help="Keep no row that shares its question, or its answer with a passage, with this data set; may be "
        "repeated.",
    ),
]
_Batch = Annotated[int, integer(_RUN, "Texts written side by side; a kill loses one batch.")]
_Seed = Annotated[int, integer(_RUN, "Of everything random.")]


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
    rows: Annotated[int, integer(_ROWS, "How many to make; a larger number later adds to them.")] = 1000,
    exclude: _Exclude = None,
    row_passages: Annotated[int, integer(_ROWS, "Passages of a row, its evidence included.")] = 10,
    choices: Annotated[float, number(_ROWS, "Share of multiple choices.")] = 0.2,
    claims: Annotated[float, number(_ROWS, "Share of claims to check.")] = 0.2,
    answer_words: Annotated[int, integer(_ROWS, "Words of the longest answer.")] = 6,
    batch: _Batch = 16,
    seed: _Seed = 0,
    as_json: Json = False,
    model: _Writer = _WRITER,
    dtype: common.Dtype = "int8",
    device: common.Device = None,
) -> None:
    """Make questions, choices and claims of passages, to train a RAG drafter on.

    A row keeps its passage as evidence, and others that its question finds and that do not hold the answer. A run
    that is stopped, or killed, is resumed by the same command.

    Example: specrag train questions --passages wiki.jsonl --rows 1000 --out questions/
    """
    with _recipes():
        from recipes.questions import QuestionSettings, make_questions
    from specrag.training import EvaluationRows

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
        show = opened.enter_context(progress_bar(_note, "it"))
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
        int, integer(_ROWS, "Most passages of a row; how many, and which beside the evidence, is drawn.")
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
    as_json: Json = False,
    model: _Writer = _WRITER,
    dtype: common.Dtype = "int8",
    device: common.Device = None,
) -> None:
    """Let a strong model write a rationale for each row, and keep those from which the answer follows.

    A run that is stopped, or killed, is resumed by the same command.

    Example: specrag train rationales questions/ --out rationales/
    """
    with _recipes():
        from recipes.rationales import RationaleSettings, write_rationales
    from specrag.training.drafter import read_rows, without_evaluation

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
        show = opened.enter_context(progress_bar(_note, "it"))
        made = write_rationales(writer, given, out, settings, command=common.this_command(), show=show)
    _tell(made, as_json)


def _pool(passages: list[Path], kb: Path | None, index: str, opened: ExitStack) -> PassagePool:
    from recipes.passages import FilePassages, KnowledgeBasePassages

    if bool(passages) == (kb is not None):
        given = [str(path) for path in passages]
        raise InputError(
            "--passages", given, "give files of passages or a knowledge base with --kb, one of both"
        )
    if kb is None:
        return FilePassages(passages)
    from specrag.retrieval import KnowledgeBase

    return KnowledgeBasePassages(opened.enter_context(KnowledgeBase.open(kb)), index)


def _open_writer(model: str, dtype: str, device: str | None, opened: ExitStack) -> TextGenerator:
    if model.startswith(("http://", "https://")):
        from specrag.models.endpoint import open_endpoint

        return opened.enter_context(open_endpoint(model))
    from specrag.language_model import load
    from specrag.methods import LocalGenerator

    llm = load(model, dtype=dtype, device=device, progress=True)
    opened.callback(llm.close)
    return LocalGenerator(llm)


def _note(status: Status) -> str:
    return f"rows, {status.rejected:,} rejected"


@contextmanager
def _recipes() -> Iterator[None]:
    """Import from ``recipes``, which is not part of the installed package, inside the block.

    Raises:
        SpecragError: it is not there.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "recipes":
            raise
        raise SpecragError(
            "train: the recipes that make rows are not part of the installed package: "
            "run this in a clone of the repository, with `pip install -e .`"
        ) from None


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
