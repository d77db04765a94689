"""What the kNN-LM suite searches and continues: datastores of real text, one enlarged beyond it, and prompts."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from benchmarks.passages.subjects import Models
from specrag.bench.data import SAMPLE as TEXT
from specrag.bench.data import WIKITEXT_TEST, WIKITEXT_VALID, find_file, read_wikitext
from specrag.bench.suite import BenchContext
from specrag.errors import InputError

if TYPE_CHECKING:
    from specrag.methods.knn_lm.store.datastore import Datastore
    from specrag.methods.knn_lm.store.index import FlatKeys, Neighbours
    from specrag.methods.knn_lm.store.windows import Tokens
    from specrag.retrieval.index.scoring import Floats

VALID, TEST, PASSAGES = WIKITEXT_VALID, WIKITEXT_TEST, "corpus_wiki_passages.jsonl"

#: How far a copied key of an enlarged datastore lies from its original, in standard deviations of a key's numbers.
NOISE = 0.5

_BLOCK = 65_536


@dataclass(frozen=True, slots=True)
class Store:
    """A datastore to measure with.

    Args:
        title: as the tables name it.
        text: the file that it is made of; empty for the built-in sample.
        entries: at most.
        real: entries made from text; the others are copies of them with noise.
        hnsw: whether it has a graph.
    """

    title: str
    text: str
    entries: int
    real: int
    hnsw: bool = False

    @property
    def simulated(self) -> bool:
        """Whether some of it was never text."""
        return self.real < self.entries


class Stores:
    """Datastores, built when they are first asked for and kept beside the records.

    Args:
        context: of the run.
        models: that reads the text.
    """

    def __init__(self, context: BenchContext, models: Models) -> None:
        self._data = context.data
        self._work = context.out / ".records"
        self._models = models
        self._open: dict[Store, Datastore] = {}

    def close(self) -> None:
        """Let them go."""
        for store in self._open.values():
            store.close()
        self._open.clear()

    def get(self, store: Store) -> Datastore:
        """Open; built first, or brought up to date, which takes no time if it is there."""
        if store not in self._open:
            self._open[store] = self._make(store)
        return self._open[store]

    def text(self, name: str, most: int) -> list[Tokens]:
        """The first tokens of a file of the data, WikiText as ordinary text; of the built-in sample without data.

        Raises:
            InputError: the data lack it.
        """
        from specrag.methods.knn_lm.store.windows import read_texts

        llm = self._models.get()
        if self._data is None or not name:
            # What is tested must not stand in the datastore.
            border = 2 * len(TEXT) // 3
            path = self._work / f"knnlm-sample-{'test' if name else 'store'}.txt"
            path.write_text(TEXT[border:] if name else TEXT[:border], encoding="utf-8")
        elif name in (VALID, TEST):
            path = self._work / f"knnlm-{name}"
            path.write_text(read_wikitext(self._data, name), encoding="utf-8")
        else:
            path = find_file(self._data, name)
        found: list[Tokens] = []
        left = most
        for tokens in read_texts([path], llm.tokenizer).documents:
            if left < 2:
                break
            found.append(tokens[: left + 1])
            left -= len(found[-1]) - 1
        return found

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Beginnings to continue, evenly spread over the test text."""
        text = np.concatenate(self.text(TEST, 10**9))
        if len(text) < 2 * length:
            raise InputError("data", TEST, "it is too short for prompts")
        places = np.linspace(0, len(text) - length - 1, count).astype(np.int64)
        return [text[place : place + length].tolist() for place in places]

    def _make(self, store: Store) -> Datastore:
        from specrag.methods.knn_lm.store.build import build_datastore
        from specrag.methods.knn_lm.store.datastore import Datastore, model_record
        from specrag.methods.knn_lm.store.index import GraphSettings

        llm = self._models.get()
        record = model_record(llm.loaded)
        # The name tells WikiText's ordinary text from its tokenised form, which earlier versions read.
        form = "plain-" if store.text in (VALID, TEST) else ""
        made_of = f"{form}{store.text or 'sample'}-{store.entries}"
        folder = self._work / f"knnlm-{record.fingerprint[:8]}-{made_of}"
        if store.simulated:
            if not (folder / "manifest.json").is_file():
                enlarge(self.get(replace(store, entries=store.real)), folder, store.entries)
            return Datastore.open(folder)
        indexes = [GraphSettings()] if store.hnsw else []
        build_datastore(self.text(store.text, store.entries), folder, llm.model, record, indexes=indexes)
        return Datastore.open(folder)


def enlarge(source: Datastore, folder: Path, entries: int) -> None:
    """Write a datastore of ``entries``: those of another one, and copies of them with noise.

    A copy lies farther from every query than its original does in most cases, so that the real entries stay the
    neighbours and only the work of the search grows.
    """
    from specrag.artifacts import FileRecord
    from specrag.methods.knn_lm.store.manifest import KEYS, NORMS, VALUES, WINDOWS
    from specrag.methods.knn_lm.store.scoring import squared_norms

    shutil.rmtree(folder, ignore_errors=True)
    manifest = replace(source.manifest, generation=1, entries=entries, indexes={})
    new = manifest.generation_folder(folder)
    new.mkdir(parents=True)
    count, halves = len(source), source.halves.view(np.float16)
    spread = np.float32(NOISE * halves[:: max(count // 1000, 1)].astype(np.float32).std())
    generator = np.random.default_rng(0)
    largest = 0.0
    with (
        (new / KEYS).open("wb") as keys,
        (new / NORMS).open("wb") as norms,
        (new / VALUES).open("wb") as values,
    ):
        for first in range(0, entries, _BLOCK):
            ids = np.arange(first, min(first + _BLOCK, entries)) % count
            block = halves[ids]
            copies = np.arange(first, first + len(ids)) >= count
            if copies.any():
                noise = generator.standard_normal((len(ids), source.dimension), dtype=np.float32)
                noisy = (block.astype(np.float32) + spread * noise).astype(np.float16)
                block = np.where(copies[:, None], noisy, block)
            squares = np.empty(len(ids), dtype=np.float32)
            squared_norms(np.ascontiguousarray(block).view(np.uint16), squares)
            largest = max(largest, float(np.sqrt(squares.max(), dtype=np.float64)))
            keys.write(block.tobytes())
            norms.write(squares.tobytes())
            values.write(source.raw_values(ids).tobytes())
    (new / WINDOWS).write_bytes(b"")
    files = {name: FileRecord.of(new / name) for name in (KEYS, NORMS, VALUES, WINDOWS)}
    replace(manifest, largest_norm=largest, files=files).write(folder)


class SlowedKeys:
    """An index that takes longer, as a larger or a remote one would; its answers are the same.

    Args:
        keys: answers.
        seconds: slept in each search.
    """

    def __init__(self, keys: FlatKeys, seconds: float) -> None:
        self._keys = keys
        self._seconds = seconds

    def search(self, queries: Floats, k: int, most: int | None = None) -> list[Neighbours]:
        time.sleep(self._seconds)
        return self._keys.search(queries, k, most)


def flat_keys(store: Datastore) -> FlatKeys:
    """The exact index of a datastore."""
    return cast("FlatKeys", store.index("flat"))
