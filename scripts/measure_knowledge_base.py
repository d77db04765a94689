"""Measure changes, opening and searching of a knowledge base: prints one JSON object.

    python scripts/measure_knowledge_base.py passages.jsonl.gz --passages 10000

The passages are real text, in documents of seven; beyond those in the file they are copies, each with a number of its
own. The vectors are random unit vectors: nothing here depends on what they mean, and a network would take hours. What
is measured is what specrag does to store and find passages, without the network's time (about 20 ms a passage).
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from specrag.models import catalog
from specrag.retrieval import build as building
from specrag.retrieval import graph
from specrag.retrieval.index.base import Index, Query
from specrag.retrieval.index.scoring import Floats
from specrag.retrieval.knowledge_base import INDEXES, KnowledgeBase

DOCUMENT = 7  # passages of a document
DIMENSION = 384
REPETITIONS = 9
QUESTIONS = (
    "Which river flows through Vienna?",
    "Who wrote the first symphony in Germany?",
    "When was the football club founded?",
    "How high is the highest mountain in Africa?",
)


class RandomVectors:
    """An encoder without a network."""

    name, dtype, fingerprint, dimension, max_tokens = "minilm-l6-v2", "bf16", "random", DIMENSION, 512

    def __init__(self) -> None:
        self.tokenizer_file = catalog.resolve(self.name).folder / "tokenizer.json"
        self._draw = np.random.default_rng(0)

    def _vectors(self, count: int) -> Floats:
        vectors = self._draw.standard_normal((count, DIMENSION), dtype=np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors

    def encode_passages(self, texts: Sequence[str], advance: Callable[[int], None]) -> Floats:
        """Vectors of unit length."""
        advance(len(texts))
        return self._vectors(len(texts))

    def encode_queries(self, texts: Sequence[str]) -> Floats:
        """Vectors of unit length."""
        return self._vectors(len(texts))


def write_documents(corpus: Path, folder: Path, passages: int) -> None:
    """Write documents of seven passages each."""
    with gzip.open(corpus, "rt", encoding="utf-8") as lines:
        rows = [{"title": row["title"], "text": row["text"]} for row in map(json.loads, lines)]
    folder.mkdir()
    drawn = islice(enumerate(cycle(rows)), passages)
    while some := list(islice(drawn, DOCUMENT)):
        first = some[0][0]
        below = folder / f"{first // 100_000:03d}"
        below.mkdir(exist_ok=True)
        with (below / f"{first:09d}.jsonl").open("w", encoding="utf-8") as file:
            for number, row in some:
                if number >= len(rows):
                    row = {**row, "text": f"{row['text']} Copy {number}."}
                file.write(f"{json.dumps(row)}\n")


def seconds(action: Callable[[], object], times: int = REPETITIONS, per: int = 1) -> list[float]:
    """Seconds by the clock, the best of several, since others use the machine too; and of the processors."""
    found, worked = [], []
    for _ in range(times):
        start, before = time.perf_counter(), time.process_time()
        action()
        found.append((time.perf_counter() - start) / per)
        worked.append((time.process_time() - before) / per)
    return [round(min(found), 5), round(min(worked), 5)]


def measure_changes(documents: Path, kb: Path, encoder: Any) -> dict[str, object]:
    """Add, update and remove a document, each time with a search behind it in a base that is opened anew."""
    number = 0

    def add() -> None:
        nonlocal number
        number += 1
        text = "".join(
            json.dumps({"title": f"Note {number}", "text": f"A note {number} on tin, part {part}."}) + "\n"
            for part in range(DOCUMENT)
        )
        (documents / f"note-{number}.jsonl").write_text(text, encoding="utf-8")
        building.build([documents / f"note-{number}.jsonl"], kb, encoder=encoder)

    def add_and_find() -> None:
        add()
        with KnowledgeBase.open(kb, encoder=encoder) as base:
            hit = base.search([f"note {number} on tin"], 1, index="bm25")[0][0]
            assert hit.passage.title == f"Note {number}"

    def update() -> None:
        path = documents / f"note-{number}.jsonl"
        path.write_text(path.read_text(encoding="utf-8").replace("part 3", f"part 3 of {time.time()}"))
        building.build([path], kb, encoder=encoder)

    def remove() -> None:
        nonlocal number
        building.remove([f"note-{number}.jsonl"], kb)
        number -= 1

    add()
    return {
        "add": seconds(add),
        "add, open, find": seconds(add_and_find),
        "update one of seven": seconds(update),
        "remove": seconds(remove),
    }


_OPENING = """
import json, sys, time
sys.path[:0] = [".", "scripts"]
from measure_knowledge_base import QUESTIONS, RandomVectors
from specrag.retrieval.knowledge_base import KnowledgeBase
import specrag.retrieval.index.hnsw
encoder = RandomVectors()
start, before = time.perf_counter(), time.process_time()
base = KnowledgeBase.open(sys.argv[1], encoder=encoder)
opened = time.perf_counter()
base.search([QUESTIONS[0]], 5, index=sys.argv[2])
done = time.perf_counter()
rss = {line.split(":")[0]: int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("Rss")}
print(json.dumps({"open": round(opened - start, 4), "with the first search": round(done - start, 4),
    "of the processors": round(time.process_time() - before, 4), "MB": rss}))
"""


def measure_opening(kb: Path, index: str) -> object:
    """Open and search in a process of its own whose modules are loaded; compiled loops come from their cache."""
    runs = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", _OPENING, str(kb), index], capture_output=True, text=True, check=True
        )
        runs.append(json.loads(done.stdout))
    return min(runs, key=lambda run: run["with the first search"])


def measure_searches(kb: Path, encoder: Any) -> dict[str, object]:
    """Warm searches, without encoding."""
    found: dict[str, object] = {}
    with KnowledgeBase.open(kb, encoder=encoder) as base:
        for name in INDEXES:
            index, queries = base.index(name), base.encode(QUESTIONS, name)
            index.search(queries, 5)

            def search(index: Index = index, queries: Sequence[Query] = queries) -> None:
                for query in queries:
                    index.search([query], 5)

            found[name] = seconds(search, per=len(queries))
        many = [Query("", vector) for vector in encoder.encode_queries([""] * 32)]
        flat = base.index("flat")
        flat.search(many, 5)
        one, all_of_them = seconds(lambda: flat.search(many[:1], 5)), seconds(lambda: flat.search(many, 5))
        found["flat, 32 questions over one"] = round(all_of_them[1] / one[1], 2)
    return found


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--passages", type=int, default=10_000)
    parser.add_argument("--no-graph", action="store_true", help="leave the approximate index out")
    parser.add_argument(
        "--folder",
        type=Path,
        help="build there and end; measure what an earlier run has built there, and keep it",
    )
    chosen = parser.parse_args()
    if chosen.no_graph:
        graph._LEAST = sys.maxsize
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="specrag-measure-"))
    is_built = (folder / "built.json").is_file()
    try:
        if not is_built:
            (folder / "built.json").write_text(json.dumps(_built(chosen, folder)), encoding="utf-8")
        if is_built or chosen.folder is None:
            print(json.dumps(_measured(folder, compact=chosen.folder is None)))
    finally:
        if chosen.folder is None:
            shutil.rmtree(folder)


def _built(chosen: argparse.Namespace, folder: Path) -> dict[str, object]:
    folder.mkdir(exist_ok=True)
    documents, kb = folder / "documents", folder / "kb"
    write_documents(chosen.corpus, documents, chosen.passages)
    start = time.perf_counter()
    report = building.build([documents], kb, encoder=RandomVectors())  # type: ignore[arg-type]
    return {
        "passages": report.passages,
        "build": round(time.perf_counter() - start, 1),
        "build, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "disk, MB": sum(path.stat().st_size for path in kb.rglob("*") if path.is_file()) // 10**6,
    }


def _measured(folder: Path, *, compact: bool) -> dict[str, object]:
    documents, kb, encoder = folder / "documents", folder / "kb", RandomVectors()
    found: dict[str, object] = json.loads((folder / "built.json").read_text(encoding="utf-8"))
    parts: tuple[Callable[[], dict[str, object]], ...] = (
        lambda: measure_searches(kb, encoder),
        lambda: {f"open, {name}": measure_opening(kb, name) for name in INDEXES},
        lambda: measure_changes(documents, kb, encoder),
    )
    for part in parts:
        found |= part()
        print(json.dumps(found), file=sys.stderr, flush=True)
    if compact:
        start = time.perf_counter()
        building.compact(kb)
        found["compact"] = round(time.perf_counter() - start, 2)
    return found


if __name__ == "__main__":
    main()
