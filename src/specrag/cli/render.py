"""How a result looks on a terminal: the text as it comes, its sources, tables, notes and a line of figures."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from specrag.cli.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from specrag.models import TextStream, Tokenizer
    from specrag.request import Event, Result, Source, Table, Usage
    from specrag.speculation import DecodedToken, Step

_COLOURS = {
    "suffix": "green",
    "reference": "cyan",
    "corpus": "blue",
    "recycling": "yellow",
    "lookup": "green",
    "draft-model": "magenta",
    "eagle": "magenta",
    "rag": "magenta",
    "cache": "cyan",
}
_RELAXED = "red"

#: A narrower terminal shows only the first three columns of a table, and the last.
_WIDE = 76


# -- while it is written ----------------------------------------------------------------------------------------


class SourceColours:
    """Colours a text, as it comes, by the source of its tokens.

    Args:
        stream: turns tokens into characters; used by this object only.
    """

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
        self._styles: deque[str] = deque()  # one for each character that was decoded and not shown yet
        self._last = ""

    def paint(self, step: Step) -> Text:
        """The characters that a step shows; stop conditions may hold some back for a later one."""
        from rich.text import Text

        for token in step.tokens:
            self._last = _RELAXED if token.relaxed else _COLOURS.get(token.source, "magenta")
            if token.source == "target":
                self._last = ""
            self._styles.extend([self._last] * len(self._stream.push(token.token)))
        text = Text()
        for character in step.text:
            text.append(character, style=self._styles.popleft() if self._styles else self._last)
        return text


def show(
    events: Generator[Step | Event, None, Result],
    colours: SourceColours | None = None,
    *,
    retracts: bool = False,
) -> Result:
    """Write the text as it comes and end its line, even if an error cuts it; until it comes, show the status.

    Args:
        events: a method's; closed at the end.
        colours: colours the text by the source of its tokens.
        retracts: text may be taken back, so it is redrawn whenever it changes.
    """
    if retracts:
        return _redraw(events)
    from rich.console import Console

    from specrag.speculation import Step

    console, last = Console(), "\n"
    status = Console(stderr=True).status("")
    try:
        while True:
            event = next(events)
            if not isinstance(event, Step) and event.status:
                status.update(event.status)
                status.start()
            text = event.text if isinstance(event, Step) else event.text_gained
            if text:
                status.stop()
                if colours is None or not isinstance(event, Step):
                    sys.stdout.write(text)
                else:
                    console.print(colours.paint(event), end="", soft_wrap=True)
                sys.stdout.flush()
                last = text[-1]
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
        status.stop()
        events.close()


def _redraw(events: Generator[Step | Event, None, Result]) -> Result:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from specrag.speculation import Step

    text = ""
    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                result: Result = end.value
                return result
            if isinstance(event, Step):
                text += event.text
            else:
                text = text[: len(text) - event.text_lost] + event.text_gained
            live.update(Text(text), refresh=True)


def _end_line(last: str) -> None:
    if last != "\n":
        sys.stdout.write("\n")
        sys.stdout.flush()


# -- when it is there -------------------------------------------------------------------------------------------


def show_result(result: Result, *, details: bool, notes: Sequence[str] = ()) -> None:
    """Print what belongs below the text: sources and tables on standard output, notes and figures on standard error.

    Args:
        details: show every table and what each drafter has contributed.
        notes: the command's, shown before the method's.
    """
    from rich.console import Console
    from rich.text import Text

    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    for table in () if result.details is None else result.details.tables():
        if table.always or details:
            _show_table(console, table)
    if not _abstained(result):
        show_sources(console, result.sources)
    found = [] if result.details is None else result.details.notes()
    for note in (*notes, *found):
        errors.print(f"note: {printable(note)}", style="yellow", soft_wrap=True, markup=False)
    if details and result.usage.drafted:
        errors.print(legend(result.usage), soft_wrap=True)
    errors.print(Text("; ".join(_figures(result)), style="dim"), soft_wrap=True)


def show_sources(console: Console, sources: Sequence[Source]) -> None:
    """Print an empty line and one line per source; nothing if there is none."""
    from rich.text import Text

    if not sources:
        return
    console.print()
    for source in sources:
        passage = source.passage
        where = ", ".join(printable(part) for part in (passage.source, passage.place) if part)
        line = Text()
        line.append(f"[{source.number}] ", style="bold" if source.cited else "dim")
        line.append(f"{printable(passage.title or passage.source)}  ", style="bold" if source.cited else "")
        line.append(f"{where}  score {source.score:.3g}", style="dim")
        if source.cited:
            line.append("  ", style="dim").append("used", style="green")
        console.print(line, soft_wrap=True)


def legend(usage: Usage) -> Text:
    """What each colour means, with the guesses of each source."""
    from rich.text import Text

    text = Text("sources: ")
    text.append(f"target {usage.completion_tokens - usage.accepted}")
    for source, drafted in sorted(usage.drafted_by.items()):
        accepted = usage.accepted_by.get(source, 0)
        text.append("  ")
        text.append(f"{source} {accepted} of {drafted}", style=_COLOURS.get(source, "magenta"))
    if usage.relaxed:
        text.append("  ")
        text.append(f"relaxed {usage.relaxed}", style=_RELAXED)
    return text


def show_log_probs(tokenizer: Tokenizer, tokens: Sequence[DecodedToken]) -> None:
    """Print a table on standard error: each token, its probability, and its alternatives."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("token")
    table.add_column("log-probability", justify="right")
    table.add_column("alternatives", style="dim")
    for token in tokens:
        others = "  ".join(
            f"{_quoted(tokenizer, other.token)} {math.exp(other.log_prob):.1%}"
            for other in token.alternatives
        )
        assert token.log_prob is not None
        table.add_row(
            Text(_quoted(tokenizer, token.token)),
            f"{token.log_prob:.3f} ({math.exp(token.log_prob):.1%})",
            Text(others),
        )
    Console(stderr=True).print(table)


def describe(result: Result, method: str, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Describe a result for programs.

    Args:
        tokenizer: that of the model that wrote it, if there is one here.
    """
    details = result.details
    return {
        "text": result.text,
        "method": method,
        "finish_reason": result.finish_reason,
        "tokens": [] if tokenizer is None else [_describe_token(tokenizer, token) for token in result.tokens],
        "sources": [_describe_source(source) for source in result.sources],
        "usage": result.describe_usage(),
        "details": {} if details is None else details.record(),
    }


def _describe_source(source: Source) -> dict[str, Any]:
    """Describe a source with its whole path and metadata: the user of the command may read the folder."""
    passage = source.passage
    return {**source.describe(), "source": passage.source, "metadata": dict(passage.metadata)}


def _describe_token(tokenizer: Tokenizer, token: DecodedToken) -> dict[str, Any]:
    described: dict[str, Any] = {
        "id": token.token,
        "text": tokenizer.decode([token.token]),
        "source": token.source,
        "relaxed": token.relaxed,
    }
    if token.log_prob is not None:
        described["log_prob"] = token.log_prob
        described["alternatives"] = [
            {"id": other.token, "text": tokenizer.decode([other.token]), "log_prob": other.log_prob}
            for other in token.alternatives
        ]
    return described


def _abstained(result: Result) -> bool:
    return result.details is not None and bool(result.details.summary().get("abstained"))


def _figures(result: Result) -> list[str]:
    usage, timing = result.usage, result.timing
    count = usage.completion_tokens
    times = [
        *(
            f"{name.replace('_', ' ')} {seconds:.2f} s"
            for name, seconds in timing.phases.items()
            if seconds >= 0.005
        ),
        *([f"prefill {timing.prefill:.2f} s"] if timing.prefill else []),
        *([f"decoding {timing.decode:.2f} s"] if count else []),
    ]
    parts = (
        [f"{count} token{'s' if count != 1 else ''}, {result.tokens_per_second:.1f} tokens/s"]
        if count
        else []
    )
    if times:
        parts.append(", ".join(times))
    if result.details is not None:
        parts += result.details.figures()
    if usage.drafted:
        parts.append(
            f"{usage.mean_accepted_tokens:.2f} tokens a pass, {usage.accepted} of {usage.drafted} guesses accepted"
        )
    if result.finish_reason == "length":
        parts.append("cut at the limit")
    return parts


def _show_table(console: Console, table: Table) -> None:
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    console.print()
    if not table.columns:
        console.print(printable(table.title), style="dim", soft_wrap=True)
        for first, *others in table.rows:
            line = Text(printable(first))
            line.append(f"  {'  '.join(printable(other) for other in others)}", style="dim")
            console.print(line, soft_wrap=True)
        return
    shown = list(range(len(table.columns)))
    if console.width < _WIDE and len(shown) > 3:  # the first three say what it is, the last how good
        shown = [*shown[:3], shown[-1]]
    grid = Grid(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for place in shown:
        widest = max(len(row[place]) for row in table.rows)
        grid.add_column(table.columns[place], no_wrap=widest <= 8, ratio=None if widest <= 8 else 1)
    for number, row in enumerate(table.rows):
        style = "bold" if number == table.best else ""
        cells = ["\n".join(printable(line) for line in row[place].split("\n")) for place in shown]
        grid.add_row(*(Text(cell) for cell in cells), style=style)
    console.print(grid)


def _quoted(tokenizer: Tokenizer, token: int) -> str:
    """A token as a reader sees it: quoted, so that spaces count; special ones by number."""
    text = tokenizer.decode([token])
    return repr(text) if text else f"<{token}>"
