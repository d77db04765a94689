"""Servers that run on this machine, so that a command can ask one in place of loading a model of its own.

A server that listens to this machine alone and needs no key notes itself in a file of the user's (``servers/PID.json``
below the models' home). Whoever looks finds those whose process lives.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specrag.artifacts import atomic_write_json
from specrag.models.catalog.store import home

#: Settings that say how the model is loaded; a command has options of the same names.
LOADING = ("dtype", "device", "adapter", "batch_invariant", "kv_dtype")


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server of this machine.

    Attributes:
        pid: its process.
        url: where it listens.
        name: what requests call its model.
        model: its name.
        is_default: whether nobody has named it.
        loading: how the model was to be loaded, such as its dtype.
        kbs: folders of its knowledge bases, by name.
        background: ends itself when nobody has asked for a while, as ``specrag serve --background`` has it.
    """

    pid: int
    url: str
    name: str
    model: str
    is_default: bool
    loading: Mapping[str, Any]
    kbs: Mapping[str, str]
    background: bool

    def base(self, folder: str) -> str | None:
        """The name by which it knows a folder."""
        wanted = str(Path(folder).expanduser().resolve())
        return next((name for name, known in self.kbs.items() if known == wanted), None)


def folder() -> Path:
    """Where servers note themselves and the background ones write their logs."""
    return home() / "servers"


@contextmanager
def noted(server: RunningServer) -> Iterator[None]:
    """Others can find the server inside the block."""
    path = folder() / f"{server.pid}.json"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    atomic_write_json(path, asdict(server))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def running_servers() -> list[RunningServer]:
    """Those whose process lives, the newest first; notes of others are removed."""
    found: list[tuple[float, RunningServer]] = []
    for path in folder().glob("*.json"):
        with suppress(OSError, ValueError, TypeError):  # it ended meanwhile, or is no note
            server = RunningServer(**json.loads(path.read_bytes()))
            if _lives(server.pid):
                found.append((path.stat().st_mtime, server))
            else:
                path.unlink(missing_ok=True)
    return [server for _, server in sorted(found, key=lambda entry: entry[0], reverse=True)]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's: the number was used again
        return False
    return True
