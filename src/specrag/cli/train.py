"""``specrag train eagle``, and what the training commands share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specrag.cli import common

if TYPE_CHECKING:
    from specrag.training import Status
    from specrag.training.eagle import Measured, Outcome

app = typer.Typer(
    help="Train what guesses: heads that draft tokens, and drafters of answers.",
    epilog="Example: specrag train eagle --model smollm2-135m --data texts/ --out head/",
    no_args_is_help=True,
)

_DATA, _TRAINING, _RUN = "Data", "Training", "Run"
_UNITS = {"answers": "tokens", "features": "texts", "training": "tokens"}
_LINE_SECONDS = 30.0

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")]


def integer(panel: str, text: str) -> Any:
    """An option that is an integer."""
    return typer.Option(parser=common.integer, metavar="N", help=text, rich_help_panel=panel)


def number(panel: str, text: str) -> Any:
    """An option that is a number."""
    return typer.Option(parser=common.number, metavar="X", help=text, rich_help_panel=panel)


@contextmanager
def progress_bar(note: Callable[[Any], str], resumed: str) -> Iterator[Callable[[Any], None]]:
    """Show a run's status: a bar on standard error; if that is not a terminal, a line now and then.

    Args:
        note: what follows a status's count: its unit, and whatever else there is to say.
        resumed: ends the message after Ctrl-C, ``the same command resumes ...``.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
    )
    bars = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
    tasks: dict[str, Any] = {}
    said, news = -_LINE_SECONDS, None

    def say(status: Any) -> None:
        nonlocal said, news
        now, newest = time.monotonic(), (status.stage, getattr(status, "measured", None))
        if newest != news or now - said >= _LINE_SECONDS or status.done == status.total:
            said, news = now, newest
            clock = time.strftime("%H:%M:%S")
            typer.echo(
                f"{clock} {status.stage}: {status.done:,} of {status.total:,} {note(status)}", err=True
            )

    def show(status: Any) -> None:
        if status.stage not in tasks:
            bars.start()
            tasks[status.stage] = bars.add_task(status.stage, total=status.total, note="")
        bars.update(tasks[status.stage], completed=status.done, total=status.total, note=note(status))

    try:
        yield show if console.is_terminal else say
    except KeyboardInterrupt:
        typer.echo(f"stopped; the same command resumes {resumed}", err=True)
        raise
    finally:
        bars.stop()


@app.callback()
def train() -> None:
    """Hold the commands together."""


@app.command()
def eagle(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the head; made if need be.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Texts to make prompts of: .txt, .jsonl, ...; may be repeated."),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Texts that are prompts as they are; may be repeated."),
    ] = None,
    exclude: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH", help="Leave out what shares text with these files, such as a benchmark."
        ),
    ] = None,
    tokens: Annotated[int, integer(_DATA, "Tokens of the model's own answers to train on.")] = 500_000,
    answer_tokens: Annotated[int, integer(_DATA, "The longest answer.")] = 192,
    length: Annotated[int, integer(_DATA, "The longest text, prompt and answer, in tokens.")] = 1024,
    temperature: Annotated[float, number(_DATA, "Of every second answer; 0: all are greedy.")] = 0.7,
    held_back: Annotated[int, integer(_DATA, "Conversations to measure on.")] = 64,
    draft_vocabulary: Annotated[
        int, integer(_TRAINING, "Propose only the N most frequent tokens; 0: all.")
    ] = 8192,
    epochs: Annotated[int, integer(_TRAINING, "Times that the data is read, at most.")] = 10,
    batch_tokens: Annotated[int, integer(_TRAINING, "Tokens of a step.")] = 4096,
    learning_rate: Annotated[float, number(_TRAINING, "The highest learning rate.")] = 1e-3,
    noise: Annotated[float, number(_TRAINING, "Largest noise on features.")] = 0.1,
    classification_weight: Annotated[
        float, number(_TRAINING, "Of the cross-entropy beside the features' loss.")
    ] = 0.1,
    unroll: Annotated[int, integer(_TRAINING, "Also train N steps deep on the head's own estimates.")] = 1,
    precision: Annotated[
        str, typer.Option(metavar="TYPE", help="bf16 or fp32.", rich_help_panel=_TRAINING)
    ] = "bf16",
    patience: Annotated[int, integer(_TRAINING, "End when N measurements in a row are no better.")] = 6,
    seed: Annotated[int, integer(_TRAINING, "Of everything random.")] = 0,
    minutes: Annotated[float | None, number(_RUN, "Stop after so long; the same command resumes.")] = None,
    checkpoint_minutes: Annotated[float, number(_RUN, "Between checkpoints.")] = 5.0,
    measure: Annotated[int, integer(_RUN, "At the end, answer N held-back prompts with the head.")] = 0,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Train anew, on the same answers.", rich_help_panel=_RUN)
    ] = False,
    threads: Annotated[int, integer(_RUN, "Threads of torch; 0: its own choice.")] = 0,
    as_json: Json = False,
    model: common.Model = "smollm2-135m",
    dtype: common.Dtype = "bf16",
    device: common.Device = None,
) -> None:
    """Train an EAGLE-2 head, which drafts for a model from the model's own hidden states.

    The model answers prompts made of the texts, and the head learns to foresee these answers. A run that is
    stopped, or killed, is resumed by the same command.

    Example: specrag train eagle --model smollm2-135m --data texts/ --out head/
    """
    from specrag.language_model import load
    from specrag.training.eagle import DataSettings, EagleRun, TrainingSettings, train_eagle

    run = EagleRun(
        data=tuple(data or ()),
        prompts=tuple(prompts or ()),
        exclude=tuple(exclude or ()),
        out=out,
        texts=DataSettings(
            tokens=tokens,
            answer_tokens=answer_tokens,
            temperature=temperature,
            length=length,
            held_back=held_back,
            seed=seed,
        ),
        training=TrainingSettings(
            draft_vocabulary=draft_vocabulary,
            epochs=epochs,
            batch_tokens=batch_tokens,
            learning_rate=learning_rate,
            noise=noise,
            classification_weight=classification_weight,
            unroll=unroll,
            precision=precision,
            patience=patience,
            seed=seed,
        ),
        fresh=fresh,
        minutes=minutes,
        checkpoint_minutes=checkpoint_minutes,
        measure=measure,
        command=common.this_command(),
    )
    common.set_threads(threads)
    llm = load(model, dtype=dtype, device=device, progress=True)
    try:
        with progress_bar(_note, "from the last checkpoint") as show:
            outcome = train_eagle(llm, run, show)
    finally:
        llm.close()
    _tell(outcome, as_json)


def _note(status: Status[Measured]) -> str:
    unit = _UNITS[status.stage]
    return unit if status.measured is None else f"{unit}, held back: {_quality(status.measured)}"


def _quality(measured: Measured) -> str:
    right = ", ".join(f"{accuracy:.0%}" for accuracy in measured.accuracy)
    losses = f"{measured.held_back_regression:.4f} + {measured.held_back_classification:.4f}"
    return f"loss {losses}, right {right}, {measured.mat:.2f} tokens a pass"


def _tell(outcome: Outcome, as_json: bool) -> None:
    progress = outcome.progress
    if as_json:
        found = {
            "out": str(outcome.out),
            "stage": outcome.stage,
            "finished": bool(outcome.ended),
            "ended": outcome.ended,
            "step": 0 if progress is None else progress.step,
            "tokens": 0 if progress is None else progress.tokens,
            "kept": None if outcome.kept is None else asdict(outcome.kept),
            "measured_mat": None if outcome.measured is None else outcome.measured.mean_accepted_tokens,
        }
        typer.echo(json.dumps(found))
        return
    if not outcome.ended:
        typer.echo(f"stopped in the stage {outcome.stage!r}; the same command resumes it")
    if progress is not None:
        ended = f" ({outcome.ended})" if outcome.ended else ""
        typer.echo(f"trained:   {progress.step:,} steps on {progress.tokens:,} tokens{ended}")
    if outcome.kept is not None:
        typer.echo(f"held back: {_quality(outcome.kept)}")
        if outcome.measured is not None:
            typer.echo(f"measured:  {outcome.measured.mean_accepted_tokens:.2f} tokens a pass")
        typer.echo(f"written:   {outcome.out}, for -o drafter=eagle:{outcome.out}")


# After everything that they need from this module: each adds its commands to `app`.
import specrag.cli.train_drafter  # noqa: E402
import specrag.cli.train_rows  # noqa: E402, F401
