"""ZIP packages of XML (Office, OpenDocument, EPUB) within limits; XML without entities, network access, deep trees."""

from __future__ import annotations

import posixpath
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

from specrag.retrieval.documents.converters import LARGEST, UnreadableError

PACKAGES: Mapping[str, tuple[str, str]] = {
    ".docx": ("a DOCX", "word/document.xml"),
    ".pptx": ("a PPTX", "ppt/presentation.xml"),
    ".xlsx": ("an XLSX", "xl/workbook.xml"),
    ".odt": ("an OpenDocument", "content.xml"),
    ".ods": ("an OpenDocument", "content.xml"),
    ".odp": ("an OpenDocument", "content.xml"),
    ".epub": ("an EPUB", "META-INF/container.xml"),
}
"""By ending: the kind, and the file that every package of this kind contains."""

_LARGEST_XML = 64 * 2**20  # bytes of a file that becomes a tree, which takes at least ten times as much
_ENTRIES = 10_000
_RATIO = 200  # highest compression ratio of an archive; that of text is about 20, that of bombs 1,000
_SMALL = 2**20  # bytes up to which any ratio is allowed
_SAFE = {"resolve_entities": False, "no_network": True, "load_dtd": False, "huge_tree": False}


class Package:
    """An open package; a context manager that closes it.

    Args:
        file: a path or an open file.
        ending: a key of ``PACKAGES``.
        largest: the most bytes that it may hold unpacked.

    Raises:
        UnreadableError: it is broken, of another kind, or would unpack to far more than a document contains.
    """

    def __init__(self, file: Path | IO[bytes], ending: str, largest: int = LARGEST) -> None:
        self.kind, main = PACKAGES[ending]
        try:
            self._archive = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError) as error:
            raise UnreadableError(f"broken {self.kind.split()[1]}: {type(error).__name__}: {error}") from None
        self._entries = {entry.filename: entry for entry in self._archive.infolist()}
        try:
            if main not in self._entries:
                raise UnreadableError(f"its content is a ZIP archive, not {self.kind}")
            self._check_size(largest)
            self._check_tree(main)
        except UnreadableError:
            self._archive.close()
            raise

    def __enter__(self) -> Package:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def read(self, name: str) -> bytes:
        """Read a file that is to become a tree.

        Raises:
            UnreadableError: it is missing, or too large for that.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise UnreadableError(f"it is incomplete: {name[:80]} is missing")
        self._check_tree(name)
        return self._archive.read(entry)

    def xml(self, name: str, *, recover: bool = False) -> Any:
        """The root element of a file; an empty element if there is no such file.

        Args:
            name: the file's name.
            recover: continue after invalid XML.
        """
        from lxml import etree

        parser = etree.XMLParser(**_SAFE, remove_comments=True, remove_pis=True, recover=recover)
        return etree.fromstring(self.read(name) if name in self else b"<none/>", parser)

    def elements(self, name: str, tags: tuple[str, ...]) -> Iterator[Any]:
        """Elements of a file with one of these tags, as they end; each is discarded before the next one is yielded."""
        from lxml import etree

        with self._archive.open(self._entries[name]) as stream:
            for _, element in etree.iterparse(stream, tag=tags, **_SAFE):
                yield element
                element.clear()
                while element.getprevious() is not None:
                    del element.getparent()[0]

    def relations(self, name: str) -> dict[str, str]:
        """The files that an Office file refers to, by the relation's id and by its kind, such as ``styles``."""
        folder, base = posixpath.split(name)
        found: dict[str, str] = {}
        for relation in self.xml(f"{folder}/_rels/{base}.rels").iterfind("{*}Relationship"):
            if relation.get("TargetMode") != "External":
                target = inside(folder, relation.get("Target", ""))
                found[relation.get("Id", "")] = target
                found.setdefault(relation.get("Type", "").rpartition("/")[2], target)
        return found

    def _check_tree(self, name: str) -> None:
        if self._entries[name].file_size > _LARGEST_XML:
            raise UnreadableError(f"its {name[:80]} is larger than {_LARGEST_XML >> 20} MiB; split it")

    def _check_size(self, largest: int) -> None:
        packed = sum(entry.compress_size for entry in self._entries.values())
        unpacked = sum(entry.file_size for entry in self._entries.values())
        if unpacked > largest:
            raise UnreadableError(f"it unpacks to more than {largest >> 20} MiB; split it")
        if len(self._archive.infolist()) > _ENTRIES or unpacked > most_unpacked(packed):
            raise UnreadableError("it unpacks to far more than a document holds")


def most_unpacked(packed: int) -> int:
    """The most bytes that an archive of ``packed`` bytes may contain; one with more counts as a bomb."""
    return max(_RATIO * packed, _SMALL)


def inside(folder: str, target: str) -> str:
    """The name within a package of a reference in a file of ``folder``, without the part after ``#``."""
    target = unquote(target.partition("#")[0])
    return posixpath.normpath(posixpath.join("/", folder, target))[1:]


def relation_id(element: Any) -> str:
    """The relation id that an element of an Office file refers to; empty if there is none."""
    return next((value for key, value in element.attrib.items() if key.endswith("}id")), "")


def property_title(package: Package, name: str) -> str:
    """The title in a package's properties; empty without one."""
    found = next(package.xml(name).iter("{*}title"), None)
    return "" if found is None else "".join(found.itertext())
