"""``specrag bench SUITE``: measure, resume, report."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specrag.bench import SuiteRegistry, built_in_suites
from specrag.errors import InputError

if TYPE_CHECKING:
    from specrag.bench import BenchOptions, SuiteResult

_FULL_OUT = Path("build/bench")
_QUICK_OUT = Path("build/bench-quick")
_DEFAULT_MODEL = "smollm2-135m"
_STDOUT = "-"
_DEFAULT_DTYPE = "bf16"
#: Suites that take ``--dtype``.
_WITH_DTYPE = ("answers", "server", "tokens")
_BUILT_IN = built_in_suites()
_SUITE_NAMES = ", ".join(_BUILT_IN.names) or "none in this version"


def bench_command(registry: SuiteRegistry) -> Callable[..., None]:
    """Make the command for the suites of ``registry``; pass it to ``Typer.command``."""

    def bench(
        suite: Annotated[str, typer.Argument(help=f"Suite to run: {_SUITE_NAMES}.", metavar="SUITE")],
        json_file: Annotated[
            str | None,
            typer.Option("--json", metavar="FILE", help="Also write the JSON lines to FILE; - is stdout."),
        ] = None,
        quick: Annotated[bool, typer.Option("--quick", help="A short run: a minute on two cores.")] = False,
        out: Annotated[
            Path | None,
            typer.Option(
                metavar="DIR", help=f"Folder for the results (default: {_FULL_OUT}; quick: {_QUICK_OUT})."
            ),
        ] = None,
        resume: Annotated[
            bool, typer.Option("--resume/--fresh", help="Go on from the records in DIR, or start again.")
        ] = True,
        retry_failed: Annotated[
            bool, typer.Option("--retry-failed", help="When resuming, run failures again.")
        ] = False,
        data: Annotated[
            Path | None,
            typer.Option(metavar="DIR", help="Folder of data sets (default: $SPECRAG_DATA, else a sample)."),
        ] = None,
        model: Annotated[str, typer.Option(metavar="NAME", help="Target model.")] = _DEFAULT_MODEL,
        device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu or cuda.")] = "cpu",
        repeats: Annotated[
            int | None, typer.Option(metavar="N", help="Timed runs of each method on each row.")
        ] = None,
        rows: Annotated[
            int | None,
            typer.Option(
                metavar="N", help="At most N rows of each task; a later run with more goes on from there."
            ),
        ] = None,
        task: Annotated[
            list[str] | None,
            typer.Option(
                metavar="GLOB",
                help="Only tasks with such a name, as the page's tables show them. Repeatable.",
            ),
        ] = None,
        method: Annotated[
            list[str] | None,
            typer.Option(
                metavar="GLOB",
                help="Only methods with such a name; choose what they are compared with too. Repeatable.",
            ),
        ] = None,
        threads: Annotated[
            int | None, typer.Option(metavar="N", help="Threads of torch (default: its own choice).")
        ] = None,
        adapter: Annotated[
            list[str] | None,
            typer.Option(
                metavar="DIR",
                help="answers: compare this RAG drafter, a LoRA adapter of --model, with the untuned model and with "
                "what else is given so. Repeatable.",
            ),
        ] = None,
        dtype: Annotated[
            str,
            typer.Option(
                metavar="DTYPE",
                help=f"{', '.join(_WITH_DTYPE)}: bf16, or int8 for our models' weights in 8 bits.",
            ),
        ] = _DEFAULT_DTYPE,
        plots: Annotated[bool, typer.Option(help="Draw pictures.")] = True,
    ) -> None:
        """Measure a suite and write SUITE.jsonl, SUITE.md and its plots. A stopped run goes on where it was.

        Example: specrag bench engine --quick --json figures.jsonl
        """
        chosen = registry.get(suite)
        from specrag.bench import (
            BenchOptions,
            ProcessorLoad,
            TerminalProgress,
            data_folder,
            describe_machine,
            run_suite,
        )

        folder = data_folder(data)
        adapters = _find_adapters(suite, model, adapter or [])
        options = BenchOptions(
            out=out or (_QUICK_OUT if quick else _FULL_OUT),
            model=model,
            device=_check_device(device),
            quick=quick,
            data=folder,
            repeats=repeats,
            rows=rows,
            tasks=tuple(task or ()),
            methods=tuple(method or ()),
            fresh=not resume,
            retry_failed=retry_failed,
            adapters=adapters,
            dtype=_check_dtype(suite, dtype),
            draw=plots,
        )
        options = replace(options, command=_command(suite, options, threads))
        _set_threads(threads)
        load = ProcessorLoad()
        before = load.before()
        # Ended, it ends the process that a suite measures in: one that went on would slow whatever is measured next.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            with TerminalProgress() as progress:
                result = run_suite(
                    chosen,
                    options,
                    machine=describe_machine(),
                    clock=time.perf_counter,
                    load=load,
                    progress=progress,
                    load_before=before,
                )
        except (KeyboardInterrupt, SystemExit):
            typer.echo("stopped; the same command goes on from here", err=True)
            raise
        _tell(result, json_file)

    return bench


def _command(suite: str, options: BenchOptions, threads: int | None) -> str:
    """The command that repeats the measurement, without the paths of this machine."""
    words = ["specrag", "bench", suite]
    words += ["--quick"] if options.quick else []
    words += ["--model", options.model] if options.model != _DEFAULT_MODEL else []
    words += ["--device", options.device] if options.device != "cpu" else []
    words += ["--repeats", str(options.repeats)] if options.repeats is not None else []
    words += ["--rows", str(options.rows)] if options.rows is not None else []
    words += [word for glob in options.tasks for word in ("--task", glob)]
    words += [word for glob in options.methods for word in ("--method", glob)]
    words += ["--threads", str(threads)] if threads is not None else []
    words += [word for folder in options.adapters for word in ("--adapter", folder.name)]
    words += ["--dtype", options.dtype] if options.dtype != _DEFAULT_DTYPE else []
    return shlex.join(words) + (' --data "$SPECRAG_DATA"' if options.data is not None else "")


def _find_adapters(suite: str, model: str, given: Sequence[str]) -> tuple[Path, ...]:
    """The adapters' folders. Each needs a name of its own, since tables tell drafters apart by it.

    Raises:
        InputError: the suite compares no drafters, a folder is not there, or two have the same name.
        ModelFilesError: one is damaged or was made for another model.
    """
    from specrag.models import check_adapter, find_adapter

    if given and suite != "answers":
        raise InputError("--adapter", given[0], f"the suite answers compares drafters, {suite} does not")
    found = tuple(find_adapter(name).resolve() for name in given)
    names = [folder.name for folder in found]
    for folder in found:
        if names.count(folder.name) > 1:
            raise InputError("--adapter", str(folder), "another one has the same name: rename the folder")
        check_adapter(folder, model)
    return found


def _check_dtype(suite: str, dtype: str) -> str:
    if dtype not in (_DEFAULT_DTYPE, "int8"):
        raise InputError("--dtype", dtype, f"use {_DEFAULT_DTYPE} or int8")
    if dtype != _DEFAULT_DTYPE and suite not in _WITH_DTYPE:
        *most, last = _WITH_DTYPE
        others = f"{', '.join(most)} and {last} do not"
        raise InputError("--dtype", dtype, f"leave it out: {suite} chooses its dtypes itself, {others}")
    return dtype


def _check_device(device: str) -> str:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device", device, "use cpu, since torch sees no CUDA device here")
    if device not in ("cpu", "cuda"):
        raise InputError("--device", device, "use cpu or cuda")
    return device


def _set_threads(threads: int | None) -> None:
    import torch

    if threads is None:
        return
    if threads < 1:
        raise InputError("--threads", threads, "give 1 or more")
    torch.set_num_threads(threads)


def _tell(result: SuiteResult, json_file: str | None) -> None:
    from specrag.bench import to_json_lines, write_json_lines

    if json_file == _STDOUT:
        sys.stdout.write(to_json_lines(result.measurements))
        return
    if json_file is not None:
        write_json_lines(Path(json_file), result.measurements)
    typer.echo(result.page)
    typer.echo(f"written: {', '.join(str(path) for path in result.files)}", err=True)


bench = bench_command(_BUILT_IN)
