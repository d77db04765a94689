"""Makes untrusted text safe to print on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text on one line, without control characters and escape sequences, which a terminal would obey."""
    visible = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(visible.split())
