"""The second half of a build: encode the passages of a generation and write its indexes."""

from __future__ import annotations

import hashlib
import io
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specrag.artifacts import atomic_write
from specrag.retrieval.index import bm25, flat, hnsw
from specrag.retrieval.index.bm25 import BM25Index
from specrag.retrieval.index.flat import VECTORS_FILE, FlatIndex
from specrag.retrieval.index.hnsw import HnswIndex
from specrag.retrieval.manifest import write_errors
from specrag.retrieval.passage_store import PASSAGES, PassageStore
from specrag.retrieval.progress import Progress, Reporter

if TYPE_CHECKING:
    from specrag.retrieval.encoder.encoder import Encoder

GENERATION_FILES = (PASSAGES, *flat.FILES, *hnsw.FILES, *bm25.FILES)
"""What a finished generation holds."""

_SHARD = 2048  # passages encoded between two writes to the disk: the most that a kill can cost
_BLOCK = 4096  # vectors copied at a time


class OldVectors:
    """The vectors of the current generation by passage key.

    Args:
        store: its passages.
        folder: where its files lie.
    """

    def __init__(self, store: PassageStore, folder: Path) -> None:
        self._vectors = np.load(folder / VECTORS_FILE, mmap_mode="r")
        self._rows = {key: row for row, key in enumerate(store.keys())}

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def find(self, key: bytes) -> np.ndarray:
        """The vector of a passage. float32 [dimension]."""
        vector: np.ndarray = self._vectors[self._rows[key]]
        return vector


def encode_missing(
    folder: Path,
    store: PassageStore,
    old: OldVectors | None,
    shards: VectorShards,
    encoder: Callable[[], Encoder],
    report: Reporter,
) -> int:
    """Encode the passages that neither the current generation nor an unfinished build has encoded.

    Passages are put into the shards as they are done, so that a kill costs the last few at most.

    Args:
        folder: the knowledge base.
        store: the new passages.
        old: the vectors of the current generation.
        shards: those of an unfinished build, open.
        encoder: gives the encoder; called only if something is missing.

    Returns:
        How many passages were encoded.

    Raises:
        KnowledgeBaseError: the disk refuses; what was encoded before stays.
    """
    keys = store.keys()
    missing: dict[bytes, int] = {}
    for number, key in enumerate(keys):
        if key not in shards and (old is None or key not in old):
            missing.setdefault(key, number)
    done, total = len(keys) - len(missing), len(keys)
    report(Progress("encoding", done, total))
    numbers = list(missing.values())
    for start in range(0, len(numbers), _SHARD):
        some = numbers[start : start + _SHARD]
        progress = _Encoding(done, total, report)
        vectors = encoder().encode_passages(store.texts_of(some), progress.advance)
        with write_errors(folder):
            shards.add([keys[number] for number in some], vectors)
        done += len(some)
    report(Progress("encoding", total, total))
    return len(missing)


class _Encoding:
    """Progress within one shard."""

    def __init__(self, done: int, total: int, report: Reporter) -> None:
        self.done = done
        self.total = total
        self.report = report

    def advance(self, finished: int) -> None:
        self.done += finished
        self.report(Progress("encoding", self.done, self.total))


def write_indexes(
    folder: Path,
    new: Path,
    old: OldVectors | None,
    shards: VectorShards,
    dimension: int,
    report: Reporter,
) -> None:
    """Write vectors and indexes of a generation whose passages are written.

    Args:
        folder: the knowledge base.
        new: the generation.

    Raises:
        KnowledgeBaseError: the disk refuses.
    """
    store = PassageStore(new / PASSAGES)
    try:
        keys, texts = store.keys(), list(store.texts())
    finally:
        store.close()
    report(Progress("indexing", 0, 3))
    with write_errors(folder):
        write_vectors(new / VECTORS_FILE, len(keys), dimension, _blocks(keys, old, shards))
        vectors = np.load(new / VECTORS_FILE, mmap_mode="r")
        flat_index = FlatIndex.build(vectors)
        flat_index.save(new)
    report(Progress("indexing", 1, 3))
    graph = HnswIndex.build(flat_index)
    with write_errors(folder):
        graph.save(new)
    del graph
    report(Progress("indexing", 2, 3))
    terms = BM25Index.build(texts)
    with write_errors(folder):
        terms.save(new)
    report(Progress("indexing", 3, 3))


def _blocks(keys: Sequence[bytes], old: OldVectors | None, shards: VectorShards) -> Iterator[np.ndarray]:
    for start in range(0, len(keys), _BLOCK):
        yield np.stack(
            [
                shards.find(key) if old is None or key not in old else old.find(key)
                for key in keys[start : start + _BLOCK]
            ]
        )


_PREFIX = "vectors-"


class VectorShards:
    """The vectors that an unfinished build has encoded, for its rerun.

    A vector is found by its passage's key and belongs to one encoder, whose fingerprint names the folder.

    Args:
        folder: holds the shards of several encoders, of which all but this one's are removed by :meth:`open`.
        fingerprint: of the encoder.
        dimension: elements of a vector.
    """

    def __init__(self, folder: Path, fingerprint: str, dimension: int) -> None:
        self.folder = folder / f"{_PREFIX}{hashlib.sha256(fingerprint.encode()).hexdigest()[:16]}"
        self.dimension = dimension
        self._type = np.dtype([("key", "V16"), ("vector", "<f4", (dimension,))])
        self._places: dict[bytes, tuple[int, int]] = {}
        self._shards: list[np.ndarray] = []

    def open(self) -> None:
        """Load the shards of an earlier build."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for other in self.folder.parent.glob(f"{_PREFIX}*"):
            if other != self.folder:
                shutil.rmtree(other, ignore_errors=True)
        for path in sorted(self.folder.glob("*.npy")):
            try:
                shard = np.lib.format.open_memmap(path, mode="r")
                if shard.dtype != self._type or shard.ndim != 1:
                    raise ValueError("another type")
            except (OSError, ValueError):  # torn by a power failure: encoded again
                path.unlink()
                continue
            self._remember(shard)

    def _remember(self, shard: np.ndarray) -> None:
        number = len(self._shards)
        self._shards.append(shard)
        for row, key in enumerate(shard["key"]):
            self._places[key.tobytes()] = (number, row)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, keys: Sequence[bytes], vectors: np.ndarray) -> None:
        """Write one shard.

        Args:
            keys: of the passages.
            vectors: float32 [keys, dimension].

        Raises:
            OSError: the disk refuses; earlier shards stay.
        """
        shard = np.empty(len(keys), dtype=self._type)
        shard["key"] = np.frombuffer(b"".join(keys), dtype="V16")
        shard["vector"] = vectors
        path = self.folder / f"{len(self._shards):06d}-{keys[0].hex()}.npy"
        # A plain write, since a full disk kills a process that writes to a mapped file.
        data = io.BytesIO()
        np.lib.format.write_array_header_1_0(data, np.lib.format.header_data_from_array_1_0(shard))
        data.write(shard.tobytes())
        atomic_write(path, data.getbuffer())
        self._remember(np.lib.format.open_memmap(path, mode="r"))

    def find(self, key: bytes) -> np.ndarray:
        """The vector of a passage. float32 [dimension]."""
        number, row = self._places[key]
        vector: np.ndarray = self._shards[number]["vector"][row]
        return vector

    def close(self) -> None:
        """Unmap the shards; the files stay."""
        self._shards.clear()
        self._places.clear()


def write_vectors(path: Path, passages: int, dimension: int, blocks: Iterable[np.ndarray]) -> None:
    """Write a ``.npy`` file, float32 [passages, dimension], one block of rows at a time."""
    header = {"descr": "<f4", "fortran_order": False, "shape": (passages, dimension)}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype="<f4").tobytes())
