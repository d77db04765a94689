"""A real PostgreSQL with pgvector for tests and measurements, from the package ``pgserver``.

Only the package's programs are used, because its own class creates a user, opens the folders above the data to
everybody, and forgets servers that were killed.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from specrag.bench.load import OWN_SERVERS
from specrag.errors import SpecragError

# Waits until the process that started the server ends, however it ends, and stops what it has left running.
_GUARD = """
cat
kill -QUIT "$(head -n 1 "$0/data/postmaster.pid")" && sleep 1
rm -rf "$0"
"""
_NOBODY = "nobody"  # PostgreSQL refuses to run as root
_SECONDS = 60  # limit for starting and for stopping


class PostgresServer:
    """A server in a temporary folder, reached through a socket there; both are gone after :meth:`close`.

    Args:
        settings: of ``postgresql.conf``, such as ``{"shared_buffers": "512MB"}``.
    """

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        # Test data need not survive a crash of the machine.
        self.settings = {"fsync": "off", "max_connections": "40", **(settings or {})}
        self._folder = Path(tempfile.mkdtemp(prefix="specrag-pg-"))
        self._data = self._folder / "data"
        self._programs = Path()
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL of its only database, as a superuser."""
        return f"postgresql://postgres@/postgres?host={self._folder}"

    @property
    def pid(self) -> int:
        """Process id of the server's first process."""
        return int((self._data / "postmaster.pid").read_text(encoding="utf-8").split()[0])

    def __enter__(self) -> Self:
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # keeps Ctrl-C away from it
        )
        try:
            self._install()
            self._run(
                "initdb", "--auth=trust", "--username=postgres", "--encoding=UTF8", "--no-locale", "--no-sync"
            )
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start, or restart with the same data."""
        words = [f"-k {self._folder}", "-c listen_addresses=''"]
        words += [f"-c {name}={value}" for name, value in self.settings.items()]
        self._run(
            "pg_ctl", "--wait", f"--log={self._folder / 'log'}", f"--options={' '.join(words)}", "start"
        )
        OWN_SERVERS.add(self.pid)

    def stop(self, mode: str = "fast") -> None:
        """Stop. With ``fast``, clients are told; with ``immediate``, their connections end as in a crash."""
        self._run("pg_ctl", "--wait", f"--mode={mode}", "stop")

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to one of its processes."""
        os.kill(pid, number)

    def close(self) -> None:
        """Stop the server, whatever state it is in, and remove its folder."""
        if (self._data / "postmaster.pid").exists():
            try:
                self.stop("immediate")
            except SpecragError:
                self.signal(self.pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            self._guard.wait(_SECONDS)

    def _install(self) -> None:
        """Make the folders, and put the programs where the server's user can run them."""
        found = find_spec("pgserver")
        if found is None or not found.submodule_search_locations:
            raise SpecragError(
                "bench: pgserver is not installed; install specrag[bench] (Python 3.12 or older)"
            )
        package = Path(next(iter(found.submodule_search_locations)))
        self._programs = package / "pginstall" / "bin"
        self._data.mkdir()
        (self._folder / "log").touch()
        if os.geteuid() != 0:
            return
        # The package may be in a folder that only root can enter. Programs find their libraries by relative path.
        for source in (package / "pginstall", package.with_name("pgserver.libs")):
            if source.is_dir():
                target = self._folder / source.relative_to(package.parent)
                shutil.copytree(source, target, copy_function=_link_or_copy)
        self._programs = self._folder / package.name / "pginstall" / "bin"
        self._folder.chmod(0o755)
        nobody = pwd.getpwnam(_NOBODY)
        for path in (self._folder, self._data, self._folder / "log"):
            os.chown(path, nobody.pw_uid, nobody.pw_gid)

    def _run(self, program: str, *words: str) -> None:
        identity: dict[str, Any] = {}
        if os.geteuid() == 0:
            identity = {"user": _NOBODY, "group": pwd.getpwnam(_NOBODY).pw_gid, "extra_groups": ()}
        command: Sequence[str | Path] = [self._programs / program, f"--pgdata={self._data}", *words]
        # A file, since the server that pg_ctl starts would hold a pipe open.
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                command,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                cwd=self._folder,
                env={**os.environ, "LC_ALL": "C"},
                timeout=_SECONDS,
                check=False,
                **identity,
            )
            output.seek(0)
            said = output.read().decode(errors="replace")
        if done.returncode != 0:
            raise SpecragError(f"bench: {program} failed: {' '.join(said.split())[-300:]}")


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
