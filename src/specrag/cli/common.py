"""Options that several commands share, and the parsers of their values."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specrag.cli import completion
from specrag.errors import InputError

if TYPE_CHECKING:
    from specrag.cli.values import ModelValues
    from specrag.retrieval.documents import ContextFiles

STDIN = "-"

_NO_UTF8 = "it is no text in UTF-8; convert it first"


def number(text: str) -> float:
    """Parse a number of the command line; its range is checked where it is used."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not usable: give a number such as 0.7") from None


def integer(text: str) -> int:
    """Parse an integer of the command line; its range is checked where it is used."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not usable: give an integer such as 7") from None


def read_prompt(prompt: str | None, file: str | None, *, raw: bool) -> str:
    """Read the prompt from the command line, a file or standard input.

    Args:
        prompt: the words given; ``None`` if there were none.
        file: a path, or ``-`` for standard input.
        raw: keep the line end that closes a file; otherwise it is removed.

    Raises:
        InputError: there is no prompt, there are two, or the file cannot be read as UTF-8.
    """
    if prompt is not None and file is not None:
        raise InputError("--file", file, "give a prompt or a file, not both")
    if prompt is not None:
        try:
            prompt.encode()
        except UnicodeEncodeError:  # the command line holds bytes that are not UTF-8
            raise InputError("prompt", prompt, _NO_UTF8) from None
        return _checked("prompt", prompt)
    if file is None and sys.stdin.isatty():
        raise InputError("prompt", None, "give a text, a file with --file, or pipe it to standard input")
    field, data = _read(file)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(field, file or STDIN, _NO_UTF8) from None
    return _checked(field, text if raw else text.removesuffix("\n").removesuffix("\r"))


def _read(file: str | None) -> tuple[str, bytes]:
    """The name of the source for errors, and its bytes."""
    if file is None or file == STDIN:
        return "prompt", sys.stdin.buffer.read()
    try:
        return "--file", Path(file).expanduser().read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError("--file", file, f"{reason}; give a text file that can be read, or -") from error


def _checked(field: str, text: str) -> str:
    if not text.strip():
        raise InputError(field, text, "it holds no text; give at least one character")
    return text


_PANEL = "Model"

Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        "-m",
        metavar="NAME",
        help="How to answer; specrag methods lists the ways.",
        autocompletion=completion.methods,
        show_default=False,
    ),
]
MaxTokens = Annotated[
    str | None, typer.Option(metavar="N", help="At most this many tokens.", show_default=False)
]
Temperature = Annotated[
    str | None, typer.Option(metavar="X", help="0, the default: the likeliest token.", show_default=False)
]
System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="A system message in front of the conversation.")
]
File = Annotated[
    str | None, typer.Option("--file", "-f", metavar="PATH", help="A file with what to ask; - is stdin.")
]
Details = Annotated[
    bool,
    typer.Option("--details", help="Colour each token by who guessed it; show drafts and other tables."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end in place of the text.")]

Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME",
        help="A catalog name, a folder, a .gguf file or a hub id org/name.",
        autocompletion=completion.models,
        rich_help_panel=_PANEL,
    ),
]
DefaultModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="A catalog name, a folder, a .gguf file or a hub id org/name; by default the best that this machine "
        "carries (specrag models list).",
        autocompletion=completion.models,
        rich_help_panel=_PANEL,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="TYPE",
        help="fp32, bf16, fp16 or int8; auto: int8 on the CPU, bf16 on a GPU.",
        rich_help_panel=_PANEL,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE",
        help="Such as cpu or cuda:0; by default the first GPU, else the CPU.",
        rich_help_panel=_PANEL,
    ),
]
BatchInvariant = Annotated[
    bool | None,
    typer.Option(
        "--batch-invariant/--no-batch-invariant",
        help="Equal bits whatever else is in a pass, so that every lossless method writes the same text (CPU, bf16 or "
        "int8); by default with int8, where it costs little.",
        rich_help_panel=_PANEL,
    ),
]
KvDtype = Annotated[
    str,
    typer.Option(
        "--kv-dtype",
        metavar="TYPE",
        help="Keys and values: auto (as computed) or int8, which takes about half the memory.",
        rich_help_panel=_PANEL,
    ),
]


@contextmanager
def status(text: str) -> Iterator[None]:
    """Show a spinner on standard error inside the block; nothing if that is not a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


def this_command(program: str = "specrag") -> str:
    """The command that repeats this run, without the folders of this machine."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return f"{program} {shlex.join(words)}"


def set_threads(threads: int) -> None:
    """Set the threads of torch; 0 leaves the choice to torch.

    Raises:
        InputError: the number is negative.
    """
    if threads < 0:
        raise InputError("--threads", threads, "give a number of threads, 0 for torch's own choice")
    if threads:
        import torch

        torch.set_num_threads(threads)


def read_context(paths: Sequence[Path]) -> ContextFiles:
    """Read the documents of a long context.

    Raises:
        InputError: a file cannot be read as text.
    """
    from specrag.retrieval.documents import read_context as read

    try:
        return read(paths)
    except InputError as error:
        raise InputError("--context", error.value, error.remedy) from None


def model_name(given: str | None) -> str:
    """The model that was asked for, or the default."""
    from specrag.models.catalog import default_model

    return given or default_model()


def check_weights(model: str, values: ModelValues) -> None:
    """Refuse a model whose weights alone do not fit, before they are loaded.

    Raises:
        InputError: they do not fit.
    """
    from specrag.engine import MemoryNeed, check_memory, free_bytes, weights_bytes
    from specrag.models import DTYPES, default_dtype, find_device
    from specrag.models.catalog import resolve

    if values.dtype not in DTYPES or values.device not in (None, "cpu"):
        return
    files = resolve(model, progress=True)
    dtype = default_dtype(files, find_device("cpu")) if values.dtype == "auto" else values.dtype
    need = MemoryNeed(weights_bytes(files.folder, dtype), 0, 0)
    check_memory(need, free_bytes("cpu"), model)
