"""An upload or a deletion, as it is remembered."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

ENDED = ("done", "failed", "cancelled")


@dataclass(slots=True)
class Job:
    """An upload or a deletion.

    Attributes:
        id: 32 hexadecimal digits.
        kb: its knowledge base.
        key: name of the key that asked for it.
        action: ``add`` or ``remove`` documents.
        files: their names.
        status: ``waiting``, ``running``, ``done``, ``failed`` or ``cancelled``.
        stage: ``reading``, ``encoding`` or ``indexing``, while it runs.
        done, total: of the stage.
        error: why it failed, for the client.
        report: what it changed.
        created: seconds since 1970.
        tries: how often it was begun.
        cancelled: whether it is to end before it is done.
        makes_kb: whether it makes its knowledge base, which then goes with it if it fails.
    """

    id: str
    kb: str
    key: str
    action: Literal["add", "remove"]
    files: tuple[str, ...]
    status: Literal["waiting", "running", "done", "failed", "cancelled"] = "waiting"
    stage: str | None = None
    done: int = 0
    total: int = 0
    error: str | None = None
    report: dict[str, Any] | None = None
    created: float = field(default_factory=time.time)
    tries: int = 0
    cancelled: bool = False
    makes_kb: bool = False


def read_job(path: Path) -> Job | None:
    """A job's record; None where there is none, or none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = {entry.name for entry in fields(Job)}
        values = {name: value for name, value in content.items() if name in known}
        return Job(**{**values, "files": tuple(values["files"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
