"""Encode with one worker and with two; build a knowledge base while a node is killed in the middle.

``build/ray/bin/python -m benchmarks.ray OUT passages.jsonl.gz [--passages 20000]``; on a cluster of this machine whose
nodes have one processor each. Appends a line to OUT, and ends with 1 if the disturbed base is not the undisturbed one.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrag.bench.runner import code_version
from specrag.integrations.ray import ClusterEncoder
from specrag.retrieval.build import build
from specrag.retrieval.encoder.encoder import load_encoder
from specrag.retrieval.knowledge_base import KnowledgeBase
from specrag.retrieval.progress import Progress
from tests.integrations.ray.conftest import add_worker, cluster_of

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

    from specrag.retrieval.encoder.encoder import Encoder

_COMPARED = 1024  # passages
_QUESTIONS = (
    "Which river flows through Vienna?",
    "Who wrote the first symphony?",
    "When was the club founded?",
)


class _Clock:
    """Seconds of the stages of a build; kills a node when a share of the passages is encoded, if asked to."""

    def __init__(self, kill: Cluster | None = None, share: float = 0.4) -> None:
        self.encoding = 0.0
        self.killed_at: int | None = None
        self._kill, self._share = kill, share
        self._last = time.perf_counter()

    def __call__(self, progress: Progress) -> None:
        """Take what a build tells."""
        now = time.perf_counter()
        if progress.stage == "encoding" and progress.done:
            self.encoding += now - self._last
            if self._kill is not None and progress.done >= self._share * progress.total:
                self.killed_at = progress.done
                self._kill.remove_node(next(iter(self._kill.worker_nodes)), allow_graceful=False)
                self._kill = None
        self._last = now


def main() -> None:
    """Measure once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="A file of JSON lines.")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--passages", type=int, default=20_000)
    parser.add_argument("--characters", type=int, default=300, help="of a passage that are taken")
    parser.add_argument("--dtype", default="fp32")
    given = parser.parse_args()
    encoder = load_encoder("minilm-l6-v2", dtype=given.dtype)
    with tempfile.TemporaryDirectory(prefix="specrag-measure-") as made, cluster_of(1) as cluster:
        folder = Path(made)
        source = folder / "texts.jsonl"
        with gzip.open(given.corpus, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in islice(lines, given.passages)]
        texts = [str(row["text"])[: given.characters] for row in rows]
        source.write_text(
            "".join(
                json.dumps({"title": row["title"], "text": text}) + "\n"
                for row, text in zip(rows, texts, strict=True)
            ),
            encoding="utf-8",
        )
        texts = texts[:_COMPARED]
        one = _seconds(encoder, texts)
        add_worker(cluster)
        two = _seconds(encoder, texts)
        found: dict[str, Any] = {
            "passages": given.passages,
            f"{len(texts)} passages by one worker, s": one,
            "by two": two,
            "two over one": round(min(one) / min(two), 2),
        }
        print(json.dumps(found), file=sys.stderr, flush=True)
        found["undisturbed"] = _built(source, folder / "calm", encoder)
        print(json.dumps(found), file=sys.stderr, flush=True)
        clock = _Clock(cluster)
        found["one of two killed"] = _built(source, folder / "killed", encoder, clock)
        found["killed behind"] = clock.killed_at
        found["equal"] = _digest(folder / "calm") == _digest(folder / "killed")
    with given.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**found, "version": code_version()}) + "\n")
    print(json.dumps(found, indent=2))
    sys.exit(0 if found["equal"] and clock.killed_at else 1)


def _seconds(encoder: Encoder, texts: list[str]) -> list[float]:
    """Twice, when every worker has loaded the encoder."""
    there = ClusterEncoder(encoder)
    there.encode_passages(["Copper."] * 1024)
    found = []
    for _ in range(2):
        start = time.perf_counter()
        there.encode_passages(texts)
        found.append(round(time.perf_counter() - start, 1))
    return found


def _built(source: Path, kb: Path, encoder: Encoder, clock: _Clock | None = None) -> dict[str, float]:
    clock = clock or _Clock()
    report = build([source], kb, progress=clock, encoder=ClusterEncoder(encoder))
    return {"whole, s": round(report.seconds, 1), "encoding, s": round(clock.encoding, 1)}


def _digest(kb: Path) -> str:
    """Of all passages with their scores for some questions: a bit of a vector that differs changes a score."""
    digest = hashlib.sha256()
    with KnowledgeBase.open(kb) as base:
        for hits in base.search(list(_QUESTIONS), len(base), index="flat"):
            for hit in hits:
                digest.update(f"{hit.passage.text}\0{hit.score!r}\0".encode())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
