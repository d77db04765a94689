"""Run a command and save what it prints as an SVG picture of a terminal.

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
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 96


def run_in_terminal(command: list[str]) -> str:
    """Run the command with its output on a terminal of its own, so that it prints as it does for a person.

    Returns:
        Everything it printed, escape sequences included.

    Raises:
        SystemExit: the command failed.
    """
    reader, writer = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(WIDTH), "LINES": "40", "TERM": "xterm-256color"}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, env=environment
    ) as process:
        os.close(writer)
        chunks = []
        while True:
            try:
                chunk = os.read(reader, 65536)
            except OSError:  # the way Linux says that the last writer has closed the terminal
                break
            if not chunk:
                break
            chunks.append(chunk)
    os.close(reader)
    if process.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with exit code {process.returncode}")
    return b"".join(chunks).decode("utf-8", "replace")


def final_state(output: str) -> str:
    """Keep of each line what a reader sees last: progress bars redraw theirs after a carriage return."""
    # A spinner goes: up a line, and erase it.
    stayed = re.sub(r"[^\n]*\n(\x1b\[\?25[hl])*\r?\x1b\[1A\x1b\[2K", "", output.replace("\r\n", "\n"))
    # Other cursor movements and erasures mean nothing in a still picture; colours do.
    colours_only = re.sub(r"\x1b\[[0-9;?]*[A-Za-ln-z]", "", stayed)
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in colours_only.split("\n")]
    return "\n".join(lines).strip("\n")


def render(prompt: str, output: str, title: str) -> str:
    """Draw the command line and its output as SVG."""
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(Text.assemble(("$ ", "bold green"), (prompt, "bold")))
    # An empty line behind it: the frame cuts what reaches below the last one.
    console.print(Text.from_ansi(final_state(output)), end="\n\n")
    picture = console.export_svg(title=title, unique_id="terminal")
    # rich would load a font from the network; the reader's own fixed-width font does.
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.S)


def main() -> None:
    """Read the command line, run the command, write the picture."""
    parser = argparse.ArgumentParser(
        description="Save what a command prints as an SVG picture of a terminal."
    )
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    parser.add_argument("command", nargs="+", help="the command to run, behind --")
    arguments = parser.parse_args()
    output = run_in_terminal(arguments.command)
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    picture = render(shlex.join(arguments.command), output, title=Path(arguments.command[0]).name)
    arguments.picture.write_text(picture, encoding="utf-8")
    sys.stdout.write(f"{arguments.picture}\n")


if __name__ == "__main__":
    main()
