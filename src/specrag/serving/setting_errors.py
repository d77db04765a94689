"""What an operator is told of a setting that cannot be used; a secret is not shown."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import ValidationError

from specrag.errors import InputError

#: Flags that are not called as their setting.
_FLAGS = {"kbs": "kb"}


def refusal(error: ValidationError, flags: Collection[str]) -> InputError:
    """The first problem, with the flag by which it was given.

    Args:
        flags: settings that were given as flags.
    """
    problem = error.errors(include_url=False, include_input=False)[0]
    name, *inside = [str(part) for part in problem["loc"]] or ["settings"]
    remedy, value = message_of(problem["msg"]), "the value given"
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, InputError):  # a validator that shows the value
        value, remedy = cause.value, cause.remedy
    if name in flags:
        name = f"--{_FLAGS.get(name, name).replace('_', '-')}"
        remedy = remedy.replace("NAME=FOLDER", f"{name} NAME=FOLDER")
    return InputError(".".join([name, *inside]), value, remedy)


def message_of(text: str) -> str:
    """Of a validator, without pydantic's words."""
    return text.removeprefix("Value error, ")
