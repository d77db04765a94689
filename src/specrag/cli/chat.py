"""``specrag ask --chat``: questions and answers until the user leaves, and the commands in between."""

from __future__ import annotations

import re
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import typer

from specrag.checks import nearest
from specrag.cli.printable import printable
from specrag.errors import Cancelled, SpecragError

if TYPE_CHECKING:
    from specrag.cli.ask import LocalBackend
    from specrag.cli.remote import RemoteBackend
    from specrag.request import Source

_COMMAND = re.compile(r"/[a-z]*")


class _Cancels(Protocol):
    """A task, or something that stands in for one."""

    def cancel(self) -> None:
        """End it."""


@contextmanager
def interrupts_stop(task: _Cancels) -> Iterator[None]:
    """Let Ctrl-C end a task between two passes, with :class:`~specrag.errors.Cancelled`; a second one interrupts."""

    def stop(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        task.cancel()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Chat:
    """A conversation. If an answer fails or is stopped, the chat goes on with its history intact.

    Args:
        backend: the method with everything that it answers from.
        details: whether to show details below each answer.
    """

    def __init__(self, backend: LocalBackend | RemoteBackend, details: bool) -> None:
        self._backend = backend
        self._details = details
        self._history: list[dict[str, str]] = []
        self._sources: tuple[Source, ...] = ()
        self._abstained: str | None = None  # the question that was not answered
        self._commands: dict[str, tuple[Callable[[], object], str]] = {
            "/help": (self._help, "what can be typed here"),
            "/sources": (self._show_sources, "the passages of the last answer, with their text"),
            "/anyway": (self._anyway, "answer the last question whatever its passages are about"),
            "/clear": (self._clear, "forget the conversation; the next question stands alone"),
            "/quit": (lambda: None, "leave, as Ctrl-D does; Ctrl-C stops an answer, at the prompt it leaves"),
        }

    def run(self, first: str | None) -> None:
        """Talk until the input ends or the user leaves.

        Args:
            first: the first question, if it has been asked already.
        """
        said = first if first is not None else _next_line()
        while said is not None and said.strip() != "/quit":
            self._take(said.strip())
            said = _next_line()

    def _take(self, said: str) -> None:
        from specrag.methods.small_talk import small_talk

        if not said:
            return
        if _COMMAND.fullmatch(said):
            self._command(said)
        elif (reply := small_talk(said)) is not None:
            typer.echo(reply)
        else:
            self._answer(said)

    def _answer(self, question: str, *, anyway: bool = False) -> None:
        backend = self._backend.without_abstaining() if anyway else self._backend
        try:
            result = backend.answer(question, tuple(self._history), details=self._details, stoppable=True)
        except Cancelled:
            typer.echo("stopped", err=True)
        except SpecragError as error:
            typer.echo(f"error: {error}", err=True)
        else:
            self._backend = replace(self._backend, notes=())  # shown once
            self._sources = result.sources
            abstained = result.details is not None and bool(result.details.summary().get("abstained"))
            self._abstained = question if abstained else None
            if abstained:
                typer.echo("/anyway answers it all the same", err=True)
                return
            self._history += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": result.text},
            ]

    def _command(self, name: str) -> None:
        if name in self._commands:
            self._commands[name][0]()
            return
        near = nearest(name, self._commands)
        hint = f"did you mean {near}?" if near else "/help lists them"
        typer.echo(f"error: there is no command {name}; {hint}", err=True)

    def _help(self) -> None:
        for name, (_, meaning) in self._commands.items():
            typer.echo(f"{name:<10}{meaning}")

    def _anyway(self) -> None:
        if self._abstained is None:
            typer.echo("the last question has been answered", err=True)
        else:
            self._answer(self._abstained, anyway=True)

    def _clear(self) -> None:
        self._history, self._sources = [], ()
        typer.echo("forgotten", err=True)

    def _show_sources(self) -> None:
        from rich.console import Console

        from specrag.cli.render import show_sources

        if not self._sources:
            typer.echo("no answer with sources yet", err=True)
        console = Console(highlight=False)
        indent = " " * 4
        for source in self._sources:
            show_sources(console, [source])
            text = textwrap.fill(printable(source.passage.text), max(console.width, 20) - len(indent))
            console.print(textwrap.indent(text, indent), soft_wrap=True, markup=False)


def _next_line() -> str | None:
    """The next line of standard input; ``None`` at its end."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line if line else None
    import readline  # noqa: F401 - gives input() its line editing

    try:
        return input("\n> ")
    except EOFError:
        typer.echo()
        return None
