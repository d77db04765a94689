"""Command lines in forks of a process that has imported what they import in the end: two seconds sooner each."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_SECONDS = 240
_IMPORTED = [
    "specrag.cli.main",
    "specrag.methods.retrieval_decoder",
    "specrag.models.decoder",
    "specrag.models.tokenizer",
    "specrag.retrieval.encoder.encoder",
    "specrag.retrieval.knowledge_base",
    "tests.cli.warm",
]
_STREAMS = ("stdin", "stdout", "stderr")


def run(arguments: Sequence[str], stdin: bytes, environment: dict[str, str]) -> tuple[int, bytes, bytes]:
    """What ``python -m specrag`` gives: its exit status, standard output and standard error."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "stdin").write_bytes(stdin)
        process = context.Process(target=_main, args=(list(arguments), folder, environment, str(Path.cwd())))
        process.start()
        process.join(_SECONDS)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"specrag {arguments} runs for more than {_SECONDS} s")
        out, err = (Path(folder, name).read_bytes() for name in _STREAMS[1:])
        return process.exitcode, out, err


def _main(arguments: list[str], folder: str, environment: dict[str, str], place: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(place)
    for number, name in enumerate(_STREAMS):
        opened = os.open(Path(folder, name), os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
        errors = "backslashreplace" if name == "stderr" else "strict"
        setattr(sys, name, open(number, "r" if number == 0 else "w", errors=errors, closefd=False))  # noqa: SIM115
    sys.argv = ["specrag", *arguments]
    runpy.run_module("specrag", run_name="__main__", alter_sys=True)
