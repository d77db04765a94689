"""The frame of the command line: puts the commands together and turns every failure into one line.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted by Ctrl-C. A command is a file beside this one.
It holds either ``app``, a Typer with several commands, or a function with the file's name. It imports torch
and transformers inside its functions, so that ``specrag --help`` answers at once.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from specrag.cli import configuration
from specrag.errors import InputError, SpecragError
from specrag.extras import missing

COMMANDS = (
    "models",
    "index",
    "kb",
    "search",
    "methods",
    "generate",
    "ask",
    "perplexity",
    "serve",
    "bench",
    "train",
    "config",
    "doctor",
)
"""In the order of ``specrag --help``."""

_QUOTES = "'\""

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="specrag",
    help="Retrieval-augmented generation with open-weight models, made faster by speculation.",
    epilog='Example: specrag generate "Why is the sky blue?" --max-tokens 64',
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"specrag {version('specrag')}")
        raise typer.Exit


@app.callback()
def options(
    line: typer.Context,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    _debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere on the line.")
    ] = False,
) -> None:
    """Hold the options that every command shares; `run` reads ``--debug`` before the parser does."""
    if (file := configuration.find_file()) is not None:
        line.default_map, line.obj = configuration.default_map(file, line.command), file


def _mount(name: str) -> None:
    module = import_module(f"specrag.cli.{name}")
    if hasattr(module, "app"):
        app.add_typer(module.app, name=name)
    else:
        app.command(name, context_settings=getattr(module, "context_settings", None))(getattr(module, name))


for _name in COMMANDS:
    if find_spec(f"specrag.cli.{_name}"):
        _mount(_name)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _as_typed(error: SpecragError, words: Sequence[str]) -> str:
    """The message with Python's arguments renamed to what users type: ``--max-tokens``, or ``-o top_p``."""
    if not isinstance(error, InputError):
        return str(error)
    command: Any = typer.main.get_command(app)
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    options = {
        parameter.name: max(parameter.opts, key=len)
        for parameter in command.params
        if parameter.opts[0].startswith("-")
    }
    if "option" in options:
        options = {name: f"-o {name}" for name in _option_names()} | options

    def option(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"] or ""
        if name not in options or not (value or "_" in name):
            return found[0]
        if options[name].startswith("-o"):
            return f"{options[name]}={value.strip(_QUOTES).lower()}" if value else options[name]
        return f"{options[name]} {value.strip(_QUOTES)}".removesuffix(" True").strip()

    remedy = re.sub(r"\b(?P<name>[a-z]\w*)\b(=(?P<value>[\w.'\"-]+))?", option, error.remedy)
    return str(InputError(options.get(error.field, error.field), error.value, remedy))


def _option_names() -> set[str]:
    """All names that ``-o`` takes, for any method."""
    from specrag.cli.values import GROUPS
    from specrag.methods import method_class, method_names

    taken = [options for _, options in GROUPS]
    taken += [method_class(name).Options for name in method_names()]
    return {name for options in taken for name in options.model_fields}


def _report_error(message: str) -> None:
    typer.echo(f"error: {_one_line(message)}", err=True)


def _restore_terminal() -> None:
    """End the line that Ctrl-C cut and undo what a progress bar may have left: colours, a hidden cursor."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[0m\x1b[?25h\n")
        sys.stderr.flush()


def _split_debug(args: Sequence[str]) -> tuple[list[str], bool]:
    """Take ``--debug`` out of the words before a bare ``--``; the user's own text follows that."""
    end = args.index("--") if "--" in args else len(args)
    kept = [word for word in args[:end] if word != "--debug"]
    return [*kept, *args[end:]], len(kept) < end


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit code; every failure ends as one line on stderr.

    Args:
        args: the words after ``specrag``.
    """
    words, debug = _split_debug(args)
    # If colorama is installed, numba lets it write to the terminal when the process ends.
    os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")
    try:
        code = app(words, prog_name="specrag", standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader, such as `head`, went away. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:
        if debug and not isinstance(error, typer.Abort):
            traceback.print_exc()
        return _explain(error, words, debug)
    if code == EXIT_INTERRUPTED:
        _restore_terminal()
    return code if isinstance(code, int) else 0


def _explain(error: Exception, words: Sequence[str], debug: bool) -> int:
    """Print in one line what went wrong; returns the exit code."""
    if isinstance(error, typer.TyperException):
        if message := error.format_message():  # empty if the help has been printed instead
            _report_error(f"{message} ({_whence(error)})")
        return error.exit_code
    if isinstance(error, typer.Abort):
        _report_error("the input ended before the command was answered")
    elif isinstance(error, SpecragError):
        _report_error(_as_typed(error, words))
    elif isinstance(error, ModuleNotFoundError) and (known := missing(words[0], error.name)) is not None:
        _report_error(str(known))
    else:
        hint = "" if debug else " (unexpected; run with --debug for the traceback)"
        _report_error(f"{type(error).__name__}: {error}{hint}")
    return EXIT_FAILED


def _whence(error: typer.TyperException) -> str:
    """The file that the wrong value comes from, or where to find help."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is not None and parameter is not None and configuration.is_from_file(context, parameter.name):
        return f"from {configuration.file_of(context)}"
    return "see --help"


def main() -> None:
    """Run the words of ``sys.argv`` and leave with their exit code."""
    sys.exit(run(sys.argv[1:]))
