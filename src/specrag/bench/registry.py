"""The suites, by name. Nothing is imported until a suite is requested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, cast

from specrag.checks import did_you_mean
from specrag.errors import InputError, SpecragError

if TYPE_CHECKING:
    from specrag.bench.suite import Suite

NAMES = (
    "engine",
    "retrieval",
    "tokens",
    "exactness",
    "longcontext",
    "passages",
    "knnlm",
    "answers",
    "server",
)
"""The suites of a clone of the repository: ``suite()`` of ``benchmarks.NAME.suite``."""

_PACKAGE = "benchmarks"


class SuiteRegistry:
    """Suite names and how to make their suites.

    Args:
        suites: for each name, a function that makes its suite, in the order in which they are listed.
    """

    def __init__(self, suites: Mapping[str, Callable[[], Suite]]) -> None:
        self._suites = dict(suites)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._suites)

    def get(self, name: str) -> Suite:
        """Make the suite.

        Raises:
            InputError: there is no suite of this name; the message names those that exist.
            SpecragError: it is one of the repository's suites, and this is not a clone of it.
        """
        if name not in self._suites:
            exist = f"this version has {', '.join(self.names)}" if self.names else "this version has none"
            raise InputError("suite", name, f"{did_you_mean(name, self.names)}{exist}")
        return self._suites[name]()


def built_in_suites() -> SuiteRegistry:
    """The repository's suites, each imported from its ``benchmarks`` when it is requested."""
    return SuiteRegistry({name: _Loader(name) for name in NAMES})


class _Loader:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> Suite:
        module = f"{_PACKAGE}.{self.name}.suite"
        try:
            found = import_module(module)
        except ModuleNotFoundError as error:
            # Only if the suite itself is missing: a library that it lacks is another matter.
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            raise SpecragError(
                f"suite {self.name!r} is not in the installed package: run it from a clone of the repository, "
                "after `make setup`"
            ) from error
        return cast("Suite", found.suite())
