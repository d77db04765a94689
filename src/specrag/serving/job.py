"""An upload or a deletion, as it is remembered."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

ENDED = ("done", "failed")


@dataclass(slots=True)
class Job:
    """An upload or a deletion.

    Attributes:
        id: 32 hexadecimal digits.
        kb: its knowledge base.
        key: name of the key that asked for it.
        action: ``add`` or ``remove`` documents.
        files: their names.
        status: ``waiting``, ``running``, ``done`` or ``failed``.
        stage: ``reading``, ``encoding`` or ``indexing``, while it runs.
        done, total: of the stage.
        error: why it failed, for the client.
        report: what it changed.
        created: seconds since 1970.
        makes_kb: whether it makes its knowledge base, which then goes with it if it fails.
    """

    id: str
    kb: str
    key: str
    action: Literal["add", "remove"]
    files: tuple[str, ...]
    status: Literal["waiting", "running", "done", "failed"] = "waiting"
    stage: str | None = None
    done: int = 0
    total: int = 0
    error: str | None = None
    report: dict[str, Any] | None = None
    created: float = field(default_factory=time.time)
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
