"""API keys, what each of them may do, and the files that hold them.

Only a key's SHA-256 digest is kept, so that neither a log nor a memory dump can show the key. Keys are long random
strings, so one round of a fast hash is as good as many of a slow one.
"""

from __future__ import annotations

import hashlib
import hmac
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specrag.errors import InputError


def read_key(file: Path) -> str:
    """Read a key from the first line of a file.

    Raises:
        InputError: the file cannot be read.
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


SHORTEST = 16
"""Fewest characters of a key; `openssl rand -hex 32` gives 64."""

EVERY = "*"


class ApiKey(BaseModel):
    """One key.

    Args:
        key: the key itself, at least :data:`SHORTEST` printable ASCII characters; replaced by its digest at once.
        digest: in place of ``key``, its SHA-256 in hexadecimal (``printf %s "$KEY" | sha256sum``).
        name: what logs and metrics call it.
        kbs: names of the knowledge bases and datastores that it may read; ``*`` for all.
        upload: whether it may add documents to them and delete documents.
        create: whether it may make new knowledge bases; it needs ``kbs = ["*"]``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
    kbs: tuple[str, ...] = (EVERY,)
    upload: bool = False
    create: bool = False

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)

    @model_validator(mode="before")
    @classmethod
    def _hash(cls, values: Any) -> Any:
        """Replace the key by its digest."""
        if not isinstance(values, dict) or "key" not in values:
            return values
        if "digest" in values:
            raise ValueError("give key or digest, not both")
        rest = {name: value for name, value in values.items() if name != "key"}
        key = values["key"]
        if not isinstance(key, str) or len(key) < SHORTEST or not all("!" <= letter <= "~" for letter in key):
            raise ValueError(f"give a key of at least {SHORTEST} ASCII characters without spaces")
        return {**rest, "digest": hashlib.sha256(key.encode()).hexdigest()}

    @model_validator(mode="after")
    def _check(self) -> ApiKey:
        if self.create and EVERY not in self.kbs:
            raise ValueError('create needs kbs = ["*"]: what is made must be seen by who made it')
        return self

    def may_read(self, kb: str) -> bool:
        """Whether it may search a knowledge base or a datastore and learn that it exists."""
        return EVERY in self.kbs or kb in self.kbs

    def may_upload(self, kb: str) -> bool:
        """Whether it may change a knowledge base."""
        return self.upload and self.may_read(kb)


#: The key of every request if no keys are set: only this machine's users can call then.
ANYBODY = ApiKey(name="local", digest="0" * 64, kbs=(EVERY,), upload=True, create=True)


class KeyRing:
    """All keys.

    Args:
        keys: if empty, every caller is :data:`ANYBODY`; the settings then let only this machine call.
    """

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple(keys)

    @property
    def open(self) -> bool:
        """Whether no key is required."""
        return not self._keys

    def find(self, authorization: str | None) -> ApiKey | None:
        """The key that a request carries; None if it has none that is known.

        Every digest is compared, in a time that does not depend on where they differ.

        Args:
            authorization: the header, ``Bearer KEY``.
        """
        if self.open:
            return ANYBODY
        kind, _, given = (authorization or "").partition(" ")
        if kind.lower() != "bearer":
            return None
        digest = hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).hexdigest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found
