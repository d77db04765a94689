"""Text of strangers, made fit for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text on one line, without what a terminal would obey: control characters and escape sequences."""
    visible = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(visible.split())
