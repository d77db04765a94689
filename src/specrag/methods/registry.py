"""The methods by the name that Python, the command line and the bench share."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping

from specrag.errors import InputError
from specrag.methods.base import TokenMethod
from specrag.methods.plain import Plain

# The others are imported when they are asked for: they compile their loops, and importing the compiler takes longer
# than starting the command line.


def _respec() -> TokenMethod:
    from specrag.methods.respec import ReSpec

    return ReSpec()


def _prompt_lookup() -> TokenMethod:
    from specrag.methods import baselines

    return baselines.prompt_lookup()


def _token_recycling() -> TokenMethod:
    from specrag.methods import baselines

    return baselines.token_recycling()


def _sam_decoding() -> TokenMethod:
    from specrag.methods import baselines

    return baselines.sam_decoding()


METHODS: Mapping[str, Callable[[], TokenMethod]] = {
    "plain": Plain,
    "respec": _respec,
    "prompt-lookup": _prompt_lookup,
    "token-recycling": _token_recycling,
    "sam-decoding": _sam_decoding,
}
"""With their default settings; ``draft-model`` needs a model's name (``baselines.draft_model``)."""


def check_method(
    name: str, field: str = "method", known: Collection[str] = METHODS, purpose: str = ""
) -> None:
    """Check that there is a method of this name.

    Args:
        field: what an error names.
        known: the names that the caller takes.
        purpose: of what they are, such as ``for a long context``.

    Raises:
        InputError: there is none.
    """
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(field, name, f"{purpose} take one of {', '.join(known)}{hint}".lstrip())


def make_method(name: str, field: str = "method") -> TokenMethod:
    """The method of this name with its default settings.

    Args:
        field: what an error names.

    Raises:
        InputError: there is none.
    """
    check_method(name, field)
    return METHODS[name]()
