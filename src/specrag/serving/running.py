"""Finds servers on this machine, so that a command can ask one instead of loading a model itself.

A server that listens to this machine only and needs no key records itself in a file of the user's
(``servers/PID.json`` below the models' home). A search returns the servers whose process is alive.
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
from specrag.models.catalog import home

#: Settings that say how the model is loaded; commands have options of the same names.
LOADING = ("dtype", "device", "adapter", "batch_invariant", "kv_dtype")


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server of this machine.

    Attributes:
        pid: its process id.
        url: where it listens.
        name: the model's name in requests.
        model: the model's own name; empty with upstreams.
        is_default: whether the model is the default, that is, nobody named it.
        loading: how the model is loaded, such as its dtype.
        kbs: folders of its knowledge bases, by name.
        background: whether it ends itself after a while without requests, as with ``specrag serve --background``.
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
        """The server's name for the knowledge base in a folder; ``None`` if it does not serve it."""
        wanted = str(Path(folder).expanduser().resolve())
        return next((name for name, known in self.kbs.items() if known == wanted), None)


def folder() -> Path:
    """The folder in which servers record themselves and background servers write their logs."""
    return home() / "servers"


@contextmanager
def noted(server: RunningServer) -> Iterator[None]:
    """Let other processes find the server inside the block."""
    path = folder() / f"{server.pid}.json"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    atomic_write_json(path, asdict(server))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def running_servers() -> list[RunningServer]:
    """The servers whose process is alive, newest first; records of others are removed."""
    found: list[tuple[float, RunningServer]] = []
    for path in folder().glob("*.json"):
        with suppress(OSError, ValueError, TypeError):  # it has ended meanwhile, or the file is no record
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
    except PermissionError:  # the id now belongs to another user's process
        return False
    return True
