"""Passages that were read, each alone, when their knowledge base was made: keys and values in 8 bits, on disk.

``specrag index --read`` writes them; ``reuse=blocks`` maps them into memory instead of reading. A damaged file, or one
written by another version of the model, is treated as missing.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from specrag.engine import Movable, PrefixFileError, Session, gather, load_prefix, save_prefix
from specrag.errors import InputError
from specrag.methods.blocks import alone, passage_tokens, template_head
from specrag.methods.prefixes import identity_of
from specrag.retrieval import READ, Progress

if TYPE_CHECKING:
    from specrag.methods.base import LocalModel
    from specrag.models import LoadedModel
    from specrag.retrieval import KnowledgeBase, Passage

#: Passages that are read side by side.
_TOGETHER = 8

_identities: WeakKeyDictionary[object, dict[str, str]] = WeakKeyDictionary()


class BlockFiles:
    """What one model has read of a knowledge base's passages.

    The files hold the documents' content in another form. They are stored in the knowledge base's folder and deleted
    with their passages.

    Args:
        base: the knowledge base's folder.
        loaded: the model.
    """

    def __init__(self, base: Path, loaded: LoadedModel) -> None:
        self._loaded = loaded
        if loaded.model not in _identities:
            _identities[loaded.model] = identity_of(loaded)  # reads the weights' checksums
        self._identity = _identities[loaded.model]
        digest = hashlib.sha256(json.dumps(sorted(self._identity.items())).encode()).hexdigest()
        self.folder = base / READ / f"{loaded.files.name.replace('/', '-')}-{digest[:12]}"

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))

    def find(self, passage: Passage, tokens: Sequence[int]) -> Session | None:
        """A session that holds these tokens, from the passage's file; ``None`` if the file is missing or unusable.

        Call it in a thread.

        Args:
            tokens: of the passage read alone, plus one, since the cache never holds a session's newest token.
        """
        try:
            session = load_prefix(self._path(passage), self._loaded.model, self._identity)
        except (FileNotFoundError, PrefixFileError):
            return None
        # It was rounded to 8 bits, so it must never be taken for the result of reading.
        session.pasted = len(session.tokens)
        return session if session.tokens == list(tokens) else None

    def write(self, passage: Passage, session: Session) -> int:
        """Write a passage's file and return its size in bytes.

        Args:
            session: as :meth:`find` returns it.

        Raises:
            PrefixFileError: the disk refuses.
        """
        path = self._path(passage)
        save_prefix(path, session, len(session.tokens), self._identity, int8=True)
        return path.stat().st_size

    def _path(self, passage: Passage) -> Path:
        return self.folder / f"{passage.id}.safetensors"


def block_files(llm: object, retriever: object) -> BlockFiles | None:
    """What a model has read of a knowledge base; ``None`` if nothing was read, or the base is stored elsewhere."""
    folder = getattr(retriever, "folder", None)
    if not isinstance(folder, Path) or not (folder / READ).is_dir():
        return None
    return BlockFiles(folder, llm.loaded)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What ``specrag index --read`` has done.

    Attributes:
        model: the model that has read.
        passages: number of passages whose keys and values are stored now.
        read: of these, read now; the others were already there.
        left_out: those for which there was no room.
        bytes: size of the files.
        seconds: time taken.
    """

    model: str
    passages: int
    read: int
    left_out: int
    bytes: int
    seconds: float


def read_passages(
    llm: LocalModel, base: KnowledgeBase, limit_bytes: int, report: Callable[[Progress], None]
) -> ReadReport:
    """Read a knowledge base's passages, each alone, and store their keys and values; those already stored stay.

    Args:
        limit_bytes: maximum bytes of the files; passages for which there is no room are left out.
        report: receives the progress.

    Raises:
        InputError: the model's keys cannot be moved.
        PrefixFileError: the disk refuses; what was written stays.
    """
    if not isinstance(llm.loaded.model, Movable):
        raise InputError(
            "--read", llm.loaded.files.name, "this model's keys cannot be moved; take another model"
        )
    started = time.perf_counter()
    files = BlockFiles(base.folder, llm.loaded)
    head = template_head(llm)
    ids = base.ids.tolist()
    kept = read = 0
    size = files.nbytes
    for start in range(0, len(ids), _TOGETHER):
        missing = []
        for passage in base.passages(ids[start : start + _TOGETHER]):
            tokens = alone(head, passage_tokens(llm, passage))
            if files.find(passage, tokens) is None:
                missing.append((passage, tokens))
            else:
                kept += 1
        if missing and size < limit_bytes:
            for passage, session in _read(llm, missing):
                if size < limit_bytes:
                    size += files.write(passage, session)
                    read += 1
                session.close()
        report(Progress("reading passages", min(start + _TOGETHER, len(ids)), len(ids)))
    kept += read
    seconds = time.perf_counter() - started
    return ReadReport(llm.loaded.files.name, kept, read, len(ids) - kept, size, seconds)


def _read(
    llm: LocalModel, passages: Sequence[tuple[Passage, Sequence[int]]]
) -> list[tuple[Passage, Session]]:
    """Read passages side by side, each in a session of its own."""
    sessions = [Session(llm.loaded.model) for _ in passages]
    reading = [session.extend(tokens) for session, (_, tokens) in zip(sessions, passages, strict=True)]
    llm.executor.run(llm.executor.submit(gather(reading)))
    return [(passage, session) for (passage, _), session in zip(passages, sessions, strict=True)]
