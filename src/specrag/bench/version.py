"""Which code was measured: a name that changes exactly when the package's code does."""

from __future__ import annotations

import hashlib
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def code_version(package: Path = _PACKAGE) -> str:
    """The code's version, for example ``0.1.0+g1a2b3c4`` or ``0.1.0+g1a2b3c4.dirty5d6e7f80``.

    In a checkout it holds the last commit that changed the package (not the last commit: a commit to the
    documents must not throw a long run's records away) and, if files of the package differ from it, a hash of
    all of the package's source. Elsewhere it is the installed package's version alone.

    Args:
        package: the folder of the package, ``src/specrag`` in a checkout.
    """
    try:
        release = version("specrag")
    except PackageNotFoundError:
        release = "0"
    if not _is_checkout(package):
        return release
    commit = _git(package, "log", "-1", "--format=%h", "--", ".") or "none"
    local = f"g{commit}"
    if commit == "none" or _git(package, "status", "--porcelain", "--", "."):
        local += f".dirty{_source_hash(package)}"
    return f"{release}+{local}"


def _is_checkout(package: Path) -> bool:
    """True for ``src/NAME`` at a repository's top: an installed copy may lie in another's checkout."""
    top = _git(package, "rev-parse", "--show-toplevel")
    return top is not None and package.resolve() == (Path(top) / "src" / package.name).resolve()


def _git(folder: Path, *arguments: str) -> str | None:
    """Git's output without its last newline; None if git fails or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _source_hash(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
