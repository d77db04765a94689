"""``specrag train drafter``: fine-tune a RAG drafter."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specrag.cli import common
from specrag.cli.train import Json, app, integer, number, progress_bar

if TYPE_CHECKING:
    from specrag.training import Status
    from specrag.training.drafter import Drafted, Measured, Outcome

_DATA, _TRAINING, _RUN = "Rows", "Training", "Run"


@app.command()
def drafter(
    data: Annotated[
        list[Path],
        typer.Argument(metavar="ROWS...", help="Files of rows, or folders of specrag train rationales."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the drafter; made if need be.")],
    exclude: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Train on no row that shares its question, or its answer with a passage, with this data set; may be "
            "repeated.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    rows: Annotated[int, integer(_DATA, "Train on N rows, a part of any larger N; 0: all.")] = 0,
    held_back: Annotated[int, integer(_DATA, "Rows to measure on, of questions not trained on.")] = 64,
    length: Annotated[int, integer(_DATA, "Tokens of a row; longer ones lose words of passages.")] = 1024,
    without_rationales: Annotated[
        bool,
        typer.Option(
            "--without-rationales", help="Train on answers alone, behind a dash.", rich_help_panel=_DATA
        ),
    ] = False,
    form: Annotated[
        str,
        typer.Option(metavar="FORM", help="Of drafts for questions: paper or cited.", rich_help_panel=_DATA),
    ] = "paper",
    full: Annotated[
        bool,
        typer.Option("--full", help="Train all weights, not an adapter.", rich_help_panel=_TRAINING),
    ] = False,
    rank: Annotated[int, integer(_TRAINING, "Of the adapter's matrices.")] = 16,
    alpha: Annotated[float, number(_TRAINING, "Of the adapter: its change counts X / rank.")] = 32.0,
    epochs: Annotated[int, integer(_TRAINING, "Times that the rows are read, at most.")] = 3,
    batch_rows: Annotated[int, integer(_TRAINING, "Rows of a step.")] = 16,
    batch_tokens: Annotated[
        int, integer(_TRAINING, "Tokens in memory at a time; 0: a row on a CPU, 16,384 on a GPU.")
    ] = 0,
    learning_rate: Annotated[
        float | None, number(_TRAINING, "The highest (default 5e-4, with --full 2e-5).")
    ] = None,
    precision: Annotated[
        str, typer.Option(metavar="TYPE", help="bf16 or fp32.", rich_help_panel=_TRAINING)
    ] = "bf16",
    evaluations: Annotated[int, integer(_TRAINING, "Measurements in an epoch.")] = 2,
    drafts: Annotated[int, integer(_TRAINING, "Held-back rows to draft for in each; 0: none.")] = 32,
    patience: Annotated[int, integer(_TRAINING, "End when N measurements in a row are no better.")] = 4,
    seed: Annotated[int, integer(_TRAINING, "Of everything random.")] = 0,
    minutes: Annotated[float | None, number(_RUN, "Stop after so long; the same command resumes.")] = None,
    checkpoint_minutes: Annotated[float, number(_RUN, "Between checkpoints.")] = 5.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Train anew.", rich_help_panel=_RUN)] = False,
    threads: Annotated[int, integer(_RUN, "Threads of torch; 0: its own choice.")] = 0,
    as_json: Json = False,
    model: common.Model = "smollm2-135m",
    device: common.Device = None,
) -> None:
    """Tune a drafter for Speculative RAG: to write a rationale and an answer from passages.

    It is an adapter for the model, or with --full a model. A run that is stopped, or killed, is resumed by the
    same command.

    Example: specrag train drafter rationales/ --out drafter/
    """
    from specrag.training.drafter import DrafterRun, TuningSettings, train_drafter

    run = DrafterRun(
        model=model,
        data=tuple(data),
        exclude=tuple(exclude or ()),
        out=out,
        settings=TuningSettings(
            rows=rows,
            held_back=held_back,
            length=length,
            rationales=not without_rationales,
            form=form,  # type: ignore[arg-type]  # checked there
            full=full,
            rank=rank,
            alpha=alpha,
            epochs=epochs,
            batch_rows=batch_rows,
            batch_tokens=batch_tokens,
            learning_rate=learning_rate,
            precision=precision,
            evaluations=evaluations,
            drafts=drafts,
            patience=patience,
            seed=seed,
        ),
        device=device,
        fresh=fresh,
        minutes=minutes,
        checkpoint_minutes=checkpoint_minutes,
        command=common.this_command(),
    )
    common.set_threads(threads)
    with progress_bar(_note, "from the last checkpoint") as show:
        outcome = train_drafter(run, show)
    _tell(outcome, as_json)


def _note(status: Status[Measured]) -> str:
    return "steps" if status.measured is None else f"steps, held back: {_quality(status.measured)}"


def _quality(measured: Measured) -> str:
    text = f"loss {measured.held_back:.4f}, {measured.tokens_right:.0%} of tokens"
    return text if measured.drafted is None else f"{text}, {_counted(measured.drafted)}"


def _counted(drafted: Drafted) -> str:
    return f"drafts {drafted.right} right, {drafted.wrong} wrong, {drafted.malformed} malformed"


def _tell(outcome: Outcome, as_json: bool) -> None:
    progress = outcome.progress
    if as_json:
        found = {
            "out": str(outcome.out),
            "finished": bool(progress.ended),
            "ended": progress.ended,
            "step": progress.step,
            "rows": progress.rows,
            "tokens": progress.tokens,
            "untuned": asdict(outcome.untuned),
            "kept": asdict(outcome.kept),
        }
        typer.echo(json.dumps(found))
        return
    if not progress.ended:
        typer.echo("stopped; the same command resumes it")
    ended = f" ({progress.ended})" if progress.ended else ""
    typer.echo(f"trained: {progress.step:,} steps on {progress.rows:,} rows{ended}")
    typer.echo(f"untuned: {_quality(outcome.untuned)}")
    typer.echo(f"kept:    {_quality(outcome.kept)}, of step {outcome.kept.step:,}")
    typer.echo(f"written: {outcome.out}")
