"""Vectors of texts, each computed once: kept in memory and, on request, on disk, by the hash of the text."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from specrag.errors import InputError
from specrag.retrieval.disk import write_errors

if TYPE_CHECKING:
    from specrag.retrieval.encoder import Encoder
    from specrag.retrieval.scoring import Floats

#: Vectors kept in memory: 384 numbers each make 30 MB.
MOST_KEPT = 20_000

VECTORS_FILE = "context-vectors.sqlite"

_TABLE = (
    "CREATE TABLE IF NOT EXISTS vectors "
    "(key BLOB PRIMARY KEY, vector BLOB NOT NULL, checksum BLOB NOT NULL) WITHOUT ROWID"
)
_AT_ONCE = 500  # keys in one question to SQLite


class TextVectors:
    """The vectors of an encoder's texts. Safe to use from several threads.

    A key is the hash of the encoder's fingerprint, the tenant and the text, so that neither another encoder's vector
    is ever taken nor another tenant's. One that was damaged on disk is computed again.

    Args:
        encoder: computes the vectors of texts that are new.
        folder: keeps them beyond this process in a file there; ``None`` keeps them in memory only.
        most_kept: vectors in memory; the longest unused give way.

    Raises:
        InputError: ``most_kept`` is no number of vectors.
    """

    def __init__(self, encoder: Encoder, folder: Path | None = None, most_kept: int = MOST_KEPT) -> None:
        if most_kept < 0:
            raise InputError("most_kept", most_kept, "give a number of vectors, 0 for none")
        self.encoder = encoder
        self.folder = folder
        self._most_kept = most_kept
        self._kept: OrderedDict[bytes, Floats] = OrderedDict()
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str], tenant: str = "") -> Floats:
        """Vectors of unit length, float32 ``[texts, dimension]``.

        Args:
            texts: what to encode.
            tenant: whose texts they are.

        Raises:
            KnowledgeBaseError: the folder cannot be written.
        """
        keys = [self._key(text, tenant) for text in texts]
        found = self._remembered(keys)
        if self.folder is not None:
            found |= self._read(sorted({key for key in keys if key not in found}))
        # Each text once, although a context may hold it twice.
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in found}
        if missing:
            vectors = self.encoder.encode_passages(list(missing.values()))
            new = dict(zip(missing, vectors, strict=True))
            found |= new
            self._write(new)
        self._remember(found)
        if not keys:
            return np.empty((0, self.encoder.dimension), dtype=np.float32)
        return np.stack([found[key] for key in keys])

    def _key(self, text: str, tenant: str) -> bytes:
        key = hashlib.sha256(f"{self.encoder.fingerprint}\n{text}".encode("utf-8", "surrogatepass")).digest()
        # Without a tenant as it always was, so that vectors kept on disk are found again.
        return hashlib.sha256(hashlib.sha256(tenant.encode()).digest() + key).digest() if tenant else key

    def _remembered(self, keys: Sequence[bytes]) -> dict[bytes, Floats]:
        with self._lock:
            return {key: self._kept[key] for key in keys if key in self._kept}

    def _remember(self, vectors: dict[bytes, Floats]) -> None:
        with self._lock:
            for key, vector in vectors.items():
                self._kept[key] = vector
                self._kept.move_to_end(key)
            while len(self._kept) > self._most_kept:
                self._kept.popitem(last=False)

    # -- on disk --------------------------------------------------------------------------------------------

    def _read(self, keys: Sequence[bytes]) -> dict[bytes, Floats]:
        assert self.folder is not None
        found: dict[bytes, Floats] = {}
        if not (self.folder / VECTORS_FILE).is_file():
            return found
        # A file that cannot be read costs the time of computing, no more.
        with contextlib.suppress(sqlite3.DatabaseError), self._database() as database:
            for start in range(0, len(keys), _AT_ONCE):
                some = keys[start : start + _AT_ONCE]
                marks = ",".join("?" * len(some))
                rows = database.execute(
                    f"SELECT key, vector, checksum FROM vectors WHERE key IN ({marks})",  # noqa: S608
                    some,
                )
                for key, data, checksum in rows:
                    vector = np.frombuffer(data, dtype="<f4")
                    if len(vector) == self.encoder.dimension and _checksum(key, data) == checksum:
                        found[key] = vector
        return found

    def _write(self, vectors: dict[bytes, Floats]) -> None:
        if self.folder is None:
            return
        with write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            rows = [(key, vector.astype("<f4").tobytes()) for key, vector in vectors.items()]
            try:
                self._insert(rows)
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError:  # the file is no database: everything in it can be computed again
                (self.folder / VECTORS_FILE).unlink()
                self._insert(rows)

    def _insert(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        with self._database() as database:
            database.execute(_TABLE)
            database.executemany(
                "INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)",
                [(key, data, _checksum(key, data)) for key, data in rows],
            )

    @contextlib.contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        assert self.folder is not None
        connection = sqlite3.connect(self.folder / VECTORS_FILE, timeout=30)
        try:
            with connection:  # commits, or takes everything back
                yield connection
        finally:
            connection.close()


def _checksum(key: bytes, data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(key + data)
