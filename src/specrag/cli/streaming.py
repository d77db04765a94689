"""Text on the terminal as it is made."""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from specrag.cli.speculation import SourceColours

Result = TypeVar("Result")


def show(events: Generator[object, None, Result], colours: SourceColours | None = None) -> Result:
    """Write the text of the steps among the events and end its line, also where an error cuts it.

    Args:
        events: steps, and events without text; closed at the end.
        colours: colours the text by the source of its tokens.

    Returns:
        What the events return.
    """
    from rich.console import Console

    from specrag.speculation.decode import Step

    console = Console()
    last = "\n"
    try:
        while True:
            event = next(events)
            if isinstance(event, Step) and event.text:
                if colours is None:
                    sys.stdout.write(event.text)
                else:
                    console.print(colours.paint(event), end="", soft_wrap=True)
                sys.stdout.flush()
                last = event.text[-1]
    except StopIteration as end:
        _end_line(last)
        result: Result = end.value
        return result
    except BrokenPipeError:
        raise
    except Exception:
        _end_line(last)
        raise
    finally:
        events.close()


def _end_line(last: str) -> None:
    if last != "\n":
        sys.stdout.write("\n")
        sys.stdout.flush()
