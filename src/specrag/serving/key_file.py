"""The one key that may do everything, and the file that it may stand in."""

from __future__ import annotations

import stat
from pathlib import Path

from pydantic import ValidationError

from specrag.errors import InputError
from specrag.serving.keys import ApiKey


def read_key(file: Path) -> str:
    """The first line of a file.

    Raises:
        InputError: it cannot be read.
    """
    try:
        lines = file.expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(
            "api_key_file", str(file), f"{reason}; give a file whose first line is the key"
        ) from None
    return lines[0].strip() if lines else ""


def readable_by_all(file: Path) -> bool:
    """Whether every user of this machine can read a key's file."""
    return bool(file.expanduser().stat().st_mode & stat.S_IROTH)


def master_key(key: str, field: str) -> ApiKey:
    """A key that may do everything.

    Args:
        field: the setting that gave it.

    Raises:
        InputError: it cannot be used.
    """
    try:
        return ApiKey(name="master", key=key, kbs=("*",), upload=True, create=True)
    except ValidationError as error:
        message = error.errors(include_input=False)[0]["msg"].removeprefix("Value error, ")
        raise InputError(field, "the value given", message) from None
