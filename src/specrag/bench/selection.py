"""Which of a suite's tasks and methods a run measures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from specrag.bench.interleave import Row
from specrag.errors import InputError


class Selection:
    """The rows whose task, and of each the methods, that match the user's patterns.

    Args:
        tasks, methods: patterns of names, as in a shell (``quality/*``), of which one has to match; none for all.
    """

    def __init__(self, tasks: Sequence[str] = (), methods: Sequence[str] = ()) -> None:
        self.tasks = tuple(tasks)
        self.methods = tuple(methods)
        self._seen_tasks: dict[str, None] = {}
        self._seen_methods: dict[str, None] = {}

    def of(self, rows: Iterable[Row]) -> list[Row]:
        """The rows to run, each with the methods to run on it."""
        chosen = []
        for row in rows:
            self._seen_tasks[row.task] = None
            self._seen_methods |= dict.fromkeys(row.methods)
            methods = tuple(method for method in row.methods if _matches(method, self.methods))
            if methods and _matches(row.task, self.tasks):
                chosen.append(replace(row, methods=methods))
        return chosen

    def check(self) -> None:
        """Call it when all rows have been seen.

        Raises:
            InputError: a pattern matched none of them; what there was is named.
        """
        for option, patterns, seen in (
            ("--task", self.tasks, self._seen_tasks),
            ("--method", self.methods, self._seen_methods),
        ):
            for pattern in patterns:
                if not any(_matches(name, (pattern,)) for name in seen):
                    near = get_close_matches(pattern, seen, n=1)
                    hint = f"; did you mean {near[0]}?" if near else ""
                    raise InputError(option, pattern, f"it matches none of {', '.join(seen)}{hint}")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
