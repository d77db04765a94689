"""``specrag train``: teach what guesses."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specrag.cli import common

if TYPE_CHECKING:
    from specrag.training.eagle_checkpoint import Measured
    from specrag.training.eagle_run import Outcome, Status

app = typer.Typer(
    help="Train what guesses: heads that draft tokens, and drafters of answers.",
    epilog="Example: specrag train eagle --model smollm2-135m --data texts/ --out head/",
    no_args_is_help=True,
)

_DATA, _TRAINING, _RUN = "Data", "Training", "Run"
_UNITS = {"answers": "tokens", "features": "texts", "training": "tokens"}
_LINE_SECONDS = 30.0


def _integer(panel: str, metavar: str, text: str) -> Any:
    return typer.Option(parser=common.integer, metavar=metavar, help=text, rich_help_panel=panel)


def _number(panel: str, text: str) -> Any:
    return typer.Option(parser=common.number, metavar="X", help=text, rich_help_panel=panel)


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
    tokens: Annotated[int, _integer(_DATA, "N", "Tokens of the model's own answers to train on.")] = 500_000,
    answer_tokens: Annotated[int, _integer(_DATA, "N", "The longest answer.")] = 192,
    length: Annotated[int, _integer(_DATA, "N", "The longest text, prompt and answer, in tokens.")] = 1024,
    temperature: Annotated[float, _number(_DATA, "Of every second answer; 0: all are greedy.")] = 0.7,
    held_back: Annotated[int, _integer(_DATA, "N", "Conversations to measure on.")] = 64,
    draft_vocabulary: Annotated[
        int, _integer(_TRAINING, "N", "Propose only the N most frequent tokens; 0: all.")
    ] = 8192,
    epochs: Annotated[int, _integer(_TRAINING, "N", "Times that the data is read, at most.")] = 10,
    batch_tokens: Annotated[int, _integer(_TRAINING, "N", "Tokens of a step.")] = 4096,
    learning_rate: Annotated[float, _number(_TRAINING, "The highest learning rate.")] = 1e-3,
    noise: Annotated[float, _number(_TRAINING, "Largest noise on features.")] = 0.1,
    classification_weight: Annotated[
        float, _number(_TRAINING, "Of the cross-entropy beside the features' loss.")
    ] = 0.1,
    unroll: Annotated[
        int, _integer(_TRAINING, "N", "Also train N steps deep on the head's own estimates.")
    ] = 1,
    precision: Annotated[
        str, typer.Option(metavar="TYPE", help="bf16 or fp32.", rich_help_panel=_TRAINING)
    ] = "bf16",
    patience: Annotated[int, _integer(_TRAINING, "N", "End when N measurements in a row are no better.")] = 6,
    seed: Annotated[int, _integer(_TRAINING, "N", "Of everything random.")] = 0,
    minutes: Annotated[float | None, _number(_RUN, "Stop after so long; the same command goes on.")] = None,
    checkpoint_minutes: Annotated[float, _number(_RUN, "Between checkpoints.")] = 5.0,
    measure: Annotated[int, _integer(_RUN, "N", "At the end, answer N held-back prompts with the head.")] = 0,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Train anew, on the same answers.", rich_help_panel=_RUN)
    ] = False,
    threads: Annotated[int, _integer(_RUN, "N", "Threads of torch; 0: its own choice.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")] = False,
    model: common.Model = "smollm2-135m",
    dtype: common.Dtype = "bf16",
    device: common.Device = None,
) -> None:
    """Train an EAGLE-2 head, which drafts for a model from the model's own hidden states.

    The model answers prompts made of the texts, and the head learns to foresee these answers. A run that is
    stopped, or killed, goes on with the same command.

    Example: specrag train eagle --model smollm2-135m --data texts/ --out head/
    """
    from specrag.language_model import load
    from specrag.training.eagle import train_eagle
    from specrag.training.eagle_run import EagleRun
    from specrag.training.eagle_settings import DataSettings, TrainingSettings

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
    bar = _Bar()
    try:
        outcome = train_eagle(llm, run, bar.show)
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from the last checkpoint", err=True)
        raise
    finally:
        bar.close()
        llm.close()
    _tell(outcome, as_json)


class _Bar:
    """A progress bar on standard error; where that is no terminal, a line now and then."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._terminal = console.is_terminal
        self._stage = ""
        self._task = self._bars.add_task("", note="", visible=False)
        self._said = -_LINE_SECONDS
        self._measured: object = None

    def show(self, status: Status) -> None:
        """Show how far the run is."""
        note = _UNITS[status.stage]
        if status.measured is not None:
            note += f", held back: {_quality(status.measured)}"
        if not self._terminal:
            self._say(status, note)
            return
        if status.stage != self._stage:
            self._stage = status.stage
            self._bars.start()
            self._task = self._bars.add_task(status.stage, total=status.total, note=note)
        self._bars.update(self._task, completed=status.done, note=note)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._bars.stop()

    def _say(self, status: Status, note: str) -> None:
        now = time.monotonic()
        new = status.stage != self._stage or status.measured is not self._measured
        if new or now - self._said >= _LINE_SECONDS:
            self._stage, self._measured, self._said = status.stage, status.measured, now
            clock = time.strftime("%H:%M:%S")
            typer.echo(f"{clock} {status.stage}: {status.done:,} of {status.total:,} {note}", err=True)


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
        typer.echo(f"stopped in the stage {outcome.stage!r}; the same command goes on")
    if progress is not None:
        ended = f" ({outcome.ended})" if outcome.ended else ""
        typer.echo(f"trained:   {progress.step:,} steps on {progress.tokens:,} tokens{ended}")
    if outcome.kept is not None:
        typer.echo(f"held back: {_quality(outcome.kept)}")
        if outcome.measured is not None:
            typer.echo(f"measured:  {outcome.measured.mean_accepted_tokens:.2f} tokens a pass")
        typer.echo(f"written:   {outcome.out}, for --drafter eagle:{outcome.out}")


# Behind everything that they need of this module: each adds its commands to `app`.
import specrag.cli.train_drafter  # noqa: E402
import specrag.cli.train_rows  # noqa: E402, F401
