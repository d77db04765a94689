"""A server's knowledge bases: found by name, opened once, replaced when they change, never closed under a reader."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from specrag.artifacts import atomic_write_json, fsync, make_folder
from specrag.errors import InputError, ModelFilesError, SpecragError
from specrag.extras import needed_by
from specrag.retrieval import BuildSettings, KnowledgeBase, Manifest, StoredFile, settle
from specrag.retrieval.encoder import Encoders
from specrag.retrieval.stores import QuestionSearch
from specrag.serving.knowledge.places import Description, Place, check_name, is_name
from specrag.serving.settings import Settings

if TYPE_CHECKING:
    from specrag.serving.settings import StoreSettings, Table


def open_elsewhere(given: Table | StoreSettings, encoders: Encoders) -> QuestionSearch:
    """Connect to a table or another store.

    Args:
        encoders: encode questions.

    Raises:
        StoreUnavailable: the database cannot be reached.
        KnowledgeBaseError: the collection was not made by specrag.
    """
    from specrag.retrieval.stores import Limits, open_store
    from specrag.serving.settings import StoreSettings

    if isinstance(given, StoreSettings):
        limits = Limits(given.timeout, given.connect_timeout)
        address = given.address.get_secret_value()
        return QuestionSearch(open_store(address, index=given.index, limits=limits, encoder=encoders))
    with needed_by("pgvector"):
        from specrag.retrieval.stores.pgvector import table_address
    address = table_address(given.url.get_secret_value(), given.table)
    return QuestionSearch(open_store(address, index=given.index, encoder=encoders))


_DELETED = ".deleted-"  # no knowledge base's name begins so
Base: TypeAlias = KnowledgeBase | QuestionSearch


@dataclass(slots=True)
class _Opened:
    """An open knowledge base.

    Attributes:
        readers: leases on it.
        kept: whether somebody without a lease may hold it; it is then closed when they drop it.
    """

    base: Base
    readers: int = 0
    kept: bool = False
    stale: bool = field(default=False)

    def close_if_free(self) -> None:
        if self.stale and not self.readers and not self.kept:
            self.base.close()


class KnowledgeBases:
    """All knowledge bases; safe to use from several threads.

    Args:
        settings: say where they are.
        encoders: encode questions.
    """

    def __init__(self, settings: Settings, encoders: Encoders | None = None) -> None:
        self._settings = settings
        self._elsewhere: dict[str, Table | StoreSettings] = {**settings.tables, **settings.stores}
        self._encoders = encoders or Encoders()
        self._opened: dict[str, _Opened] = {}
        self._lock = threading.RLock()

    # -- names ----------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The names of all knowledge bases, sorted."""
        made: set[str] = set()
        root = self._settings.kb_root
        if root is not None:
            with contextlib.suppress(OSError):
                made = {
                    path.name
                    for path in root.iterdir()
                    if is_name(path.name) and Place(path).record.is_file()
                }
        return sorted({*self._settings.kbs, *self._elsewhere, *made})

    def __contains__(self, name: str) -> bool:
        return is_name(name) and (
            name in self._settings.kbs
            or name in self._elsewhere
            or (self._settings.kb_root is not None and self.place(name).record.is_file())
        )

    def kind(self, name: str) -> Literal["folder", "table"]:
        """The kind of a knowledge base; ``table`` for every store."""
        return "table" if name in self._elsewhere else "folder"

    def place(self, name: str) -> Place:
        """A knowledge base's folders in ``kb_root``.

        Raises:
            InputError: there is no ``kb_root``, so nothing can be uploaded here; or the name is not valid.
        """
        root = self._settings.kb_root
        if root is None:
            raise InputError("kb", name, "this server takes no uploads; its operator can set kb_root")
        return Place(root / check_name(name))

    def folder(self, name: str) -> Path:
        """The folder of a knowledge base's index."""
        configured = self._settings.kbs.get(name)
        return self.place(name).index if configured is None else configured

    # -- use ------------------------------------------------------------------------------------------------

    def get(self, name: str) -> Base:
        """A knowledge base that can be searched for as long as the caller holds it.

        Raises:
            KeyError: there is none of this name.
            InputError: it holds no documents yet.
            SpecragError: it is damaged, or its database does not answer.
        """
        with self._lock:
            opened = self._open(name)
            opened.kept = True
            return opened.base

    @contextlib.contextmanager
    def lease(self, name: str) -> Iterator[Base]:
        """A knowledge base that stays open inside the block, whatever is indexed meanwhile; raises like `get`."""
        with self._lock:
            opened = self._open(name)
            opened.readers += 1
        try:
            yield opened.base
        finally:
            with self._lock:
                opened.readers -= 1
                opened.close_if_free()

    def _open(self, name: str) -> _Opened:
        if name not in self:
            raise KeyError(name)
        opened = self._opened.get(name)
        if opened is not None and (not isinstance(opened.base, KnowledgeBase) or opened.base.is_current()):
            return opened
        if self.kind(name) == "table":
            fresh = _Opened(open_elsewhere(self._elsewhere[name], self._encoders))
        else:
            fresh = _Opened(self._open_folder(name))
        self._opened[name] = fresh
        if opened is not None:
            opened.stale = True
            opened.close_if_free()
        return fresh

    def _open_folder(self, name: str) -> KnowledgeBase:
        folder = self.folder(name)
        if not Manifest.exists(folder) and name not in self._settings.kbs:
            raise InputError("kb", name, "it holds no documents yet; upload some first")
        made = Manifest.read(folder).encoder
        try:
            encoder = self._encoders.encoder(made.name, made.dtype)
        except (InputError, ModelFilesError):
            encoder = None  # BM25 needs none; a dense search says what is missing
        return KnowledgeBase.open(folder, encoder=encoder)

    def close(self) -> None:
        """Close all of them, those with a reader when it is done."""
        with self._lock:
            for opened in self._opened.values():
                opened.stale, opened.kept = True, False
                opened.close_if_free()
            self._opened.clear()

    # -- descriptions ---------------------------------------------------------------------------------------

    def describe(self, name: str) -> Description:
        """Describe a knowledge base without loading it.

        Raises:
            KeyError: there is none of this name.
        """
        if name not in self:
            raise KeyError(name)
        if self.kind(name) == "table":
            return self._describe_table(name)
        writable = self._settings.kb_root is not None
        folder = self.folder(name)
        if name not in self._settings.kbs and not Manifest.exists(folder):
            return Description(name, "folder", 0, 0, writable=writable)
        try:
            with KnowledgeBase.open(folder) as base:
                state, encoder = base.state, base.manifest.encoder.name
        except SpecragError:
            return Description(
                name, "folder", writable=writable, problem="it cannot be read; see the server's log"
            )
        return Description(
            name,
            "folder",
            state.documents,
            state.passages,
            state.version,
            encoder,
            writable,
        )

    def _describe_table(self, name: str) -> Description:
        with self._lock:
            opened = self._opened.get(name)
        if opened is None:
            return Description(name, "table")
        return Description(name, "table", passages=len(opened.base))

    def files(self, name: str) -> list[StoredFile]:
        """The documents of a knowledge base, sorted by name; none for one that is empty.

        Raises:
            KnowledgeBaseError: it is damaged.
        """
        return [file for file, _ in self.documents(name)]

    def documents(self, name: str) -> list[tuple[StoredFile, int]]:
        """Like :meth:`files`, each with the number of its passages."""
        folder = self.folder(name)
        if not Manifest.exists(folder):
            return []
        with KnowledgeBase.open(folder) as base:
            passages = base.passages_by_document()
            return [(file, passages.get(file.document, 0)) for file in base.documents()]

    # -- new ones -------------------------------------------------------------------------------------------

    def create(self, name: str, chunk_tokens: int | None = None, chunk_overlap: int | None = None) -> None:
        """Make a knowledge base without documents.

        Raises:
            InputError: the name or a value cannot be used, there is no ``kb_root``, or there are too many.
            FileExistsError: there is one of this name.
            OSError: the disk refuses.
        """
        place = self.place(name)
        settle(BuildSettings(self._settings.encoder, None, chunk_tokens, chunk_overlap), place.index, None)
        with self._lock:
            if name in self:
                raise FileExistsError(name)
            root = self._settings.kb_root
            assert root is not None
            if sum(Place(path).record.is_file() for path in root.glob("*")) >= self._settings.max_kbs:
                raise InputError(
                    "name", name, f"there are {self._settings.max_kbs} already; delete one first"
                )
            make_folder(place.folder)
            record = {"chunk_tokens": chunk_tokens, "chunk_overlap": chunk_overlap}
            atomic_write_json(place.record, record)

    def delete(self, name: str) -> None:
        """Delete a knowledge base that was made through the API, with its documents; readers may finish.

        Raises:
            InputError: it was not made through the API.
            OSError: the disk refuses.
        """
        place = self.place(name)
        with self._lock:
            if not place.record.is_file():
                raise InputError("kb", name, "it was not made through the API; its operator can remove it")
            # A single rename, so that a kill leaves all of it or nothing.
            place.folder.rename(place.folder.with_name(f"{_DELETED}{uuid.uuid4().hex}"))
            fsync(place.folder.parent)
            opened = self._opened.pop(name, None)
            if opened is not None:
                opened.stale = True
                opened.close_if_free()
        self.remove_deleted()

    def remove_deleted(self) -> None:
        """Remove what is left of deleted knowledge bases, including those that a kill left behind."""
        root = self._settings.kb_root
        for folder in [] if root is None else root.glob(f"{_DELETED}*"):
            shutil.rmtree(folder, ignore_errors=True)

    def remove_empty(self, name: str) -> None:
        """Remove a newly made knowledge base, unless it holds or awaits documents."""
        place = self.place(name)
        with self._lock:
            awaited = any(any(folder.glob("*")) for folder in (place.incoming, place.documents))
            if not awaited and not Manifest.exists(self.folder(name)):
                place.record.unlink(missing_ok=True)  # first, so that after a kill the name is free
                shutil.rmtree(place.folder, ignore_errors=True)

    def build_settings(self, name: str) -> BuildSettings:
        """How its documents become vectors; empty settings for one that has an index, which records its own."""
        if name in self._settings.kbs or Manifest.exists(self.folder(name)):
            return BuildSettings()
        record = json.loads(self.place(name).record.read_text(encoding="utf-8"))
        return BuildSettings(
            encoder=self._settings.encoder,
            chunk_tokens=record["chunk_tokens"],
            chunk_overlap=record["chunk_overlap"],
        )
