"""A conversation on the terminal, question after question."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from specrag.cli.answers import show_answer
from specrag.errors import SpecragError

if TYPE_CHECKING:
    from specrag.methods.options import Options
    from specrag.methods.standard_rag import StandardRAG


def run_chat(rag: StandardRAG, first: str | None, options: Options) -> None:
    """Answer questions until the input ends. An answer that fails costs neither the chat nor its history."""
    history: list[dict[str, str]] = []
    question = first if first is not None else next_question()
    while question is not None:
        if question.strip():
            try:
                answer = show_answer(rag.stream(question, history, **options))
            except SpecragError as error:
                typer.echo(f"error: {error}", err=True)
            else:
                history += [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer.text},
                ]
        question = next_question()


def next_question() -> str | None:
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
