"""Run a command and save what it prints as an SVG picture of a terminal that plays it at the command's own pace.

Example: python scripts/record_terminal.py docs/images/demo.svg -- specrag generate "Why is the sky blue?"
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 96
_CHARACTER = 12.2  # wide in rich's pictures
#: Seconds in which the command line is typed, and for which the end stays.
_TYPED, _STAYS = 1.5, 6.0


@dataclass(frozen=True, slots=True)
class Moment:
    """What had been printed by then.

    Attributes:
        seconds: since the command was started.
        output: escape sequences included.
    """

    seconds: float
    output: str


def run_in_terminal(command: list[str]) -> list[Moment]:
    """Run the command with its output on a terminal of its own, so that it prints as it does for a person.

    Raises:
        SystemExit: the command failed.
    """
    reader, writer = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(WIDTH), "LINES": "40", "TERM": "xterm-256color"}
    started = time.monotonic()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, env=environment
    ) as process:
        os.close(writer)
        moments = []
        printed = b""
        while True:
            try:
                chunk = os.read(reader, 65536)
            except OSError:  # the way Linux says that the last writer has closed the terminal
                break
            if not chunk:
                break
            printed += chunk
            moments.append(Moment(time.monotonic() - started, printed.decode("utf-8", "replace")))
    os.close(reader)
    if process.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with exit code {process.returncode}")
    return moments


def final_state(output: str) -> str:
    """Keep of each line what a reader sees last: progress bars redraw theirs after a carriage return."""
    # A spinner goes: up a line, and erase it.
    stayed = re.sub(r"[^\n]*\n(\x1b\[\?25[hl])*\r?\x1b\[1A\x1b\[2K", "", output.replace("\r\n", "\n"))
    # Other cursor movements and erasures mean nothing in a picture; colours do.
    colours_only = re.sub(r"\x1b\[[0-9;?]*[A-Za-ln-z]", "", stayed)
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in colours_only.split("\n")]
    return "\n".join(lines).strip("\n")


def draw(prompt: str, output: str) -> Console:
    """The command line and its output in a terminal."""
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(Text.assemble(("$ ", "bold green"), (prompt, "bold")))
    # An empty line behind it: the frame cuts what reaches below the last one.
    console.print(Text.from_ansi(final_state(output)), end="\n\n")
    return console


def rows(prompt: str, output: str) -> list[str]:
    """The terminal's rows as plain text."""
    return draw(prompt, output).export_text().rstrip("\n").split("\n")


@dataclass(frozen=True, slots=True)
class Growth:
    """How a row of the picture comes: from when to when in seconds, and how wide it is then."""

    begins: float
    ends: float
    width: float


def growths(prompt: str, moments: Sequence[Moment]) -> list[Growth]:
    """Of each row of the last moment.

    A row counts from the first moment on at which it is a beginning of what it will be: progress that is drawn over
    never shows.
    """
    shown = [(moment.seconds, rows(prompt, moment.output)) for moment in moments]
    typed = len(rows(prompt, ""))
    found = [Growth(0.0, _TYPED, _width(row)) for row in shown[-1][1][:typed]]
    for number, whole in enumerate(shown[-1][1][typed:], typed):
        growing = [
            (seconds, state[number])
            for seconds, state in shown
            if len(state) > number and state[number].strip() and whole.startswith(state[number].rstrip())
        ]
        begins = growing[0][0] if growing else shown[-1][0]
        ends = next((seconds for seconds, row in growing if row.rstrip() == whole.rstrip()), begins)
        found.append(Growth(_TYPED + begins, _TYPED + ends, _width(whole)))
    return found


def _width(row: str) -> float:
    return _CHARACTER * (len(row.rstrip()) + 1)


def animate(picture: str, found: Sequence[Growth]) -> str:
    """Make each row of rich's picture grow from left to right, over and over."""
    whole = max(one.ends for one in found) + _STAYS
    for number, one in enumerate(found):
        stops = [0.0, one.begins / whole, max(one.ends, one.begins + 0.02) / whole, 1.0]
        moves = (
            f'<animate attributeName="width" values="0;0;{one.width:.1f};{one.width:.1f}" '
            f'keyTimes="{";".join(f"{stop:.4f}" for stop in stops)}" dur="{whole:.2f}s" repeatCount="indefinite"/>'
        )
        row = re.compile(rf'(<clipPath id="terminal-line-{number}">\s*<rect [^>]*)/>')
        picture = row.sub(lambda found, moves=moves: f"{found[1]}>{moves}</rect>", picture)  # type: ignore[misc]
    return picture


def render(prompt: str, moments: Sequence[Moment], title: str) -> str:
    """Draw the command line and its output as a moving SVG; where nothing moves, its end shows."""
    last = moments[-1].output if moments else ""
    picture = draw(prompt, last).export_svg(title=title, unique_id="terminal")
    # rich would load a font from the network; the reader's own fixed-width font does.
    still = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.S)
    return animate(still, growths(prompt, moments or [Moment(0.0, "")]))


def main() -> None:
    """Read the command line, run the command, write the picture."""
    parser = argparse.ArgumentParser(
        description="Save what a command prints as an SVG picture of a terminal."
    )
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    parser.add_argument("command", nargs="+", help="the command to run, behind --")
    arguments = parser.parse_args()
    moments = run_in_terminal(arguments.command)
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    picture = render(shlex.join(arguments.command), moments, title=Path(arguments.command[0]).name)
    arguments.picture.write_text(picture, encoding="utf-8")
    sys.stdout.write(f"{arguments.picture}\n")


if __name__ == "__main__":
    main()
