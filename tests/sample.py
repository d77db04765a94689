"""Small stores: a knowledge base of 24 Wikipedia summaries (tests/data/wikipedia-summaries), a datastore of kNN-LM."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from specrag.retrieval.knowledge_base import KnowledgeBase
    from specrag.retrieval.passage import Passage

VILLAGE = (
    "The library of the village was founded in 1881 by a schoolteacher. The library of the village has four "
    "thousand books, of which two thousand are novels. The library of the village burned down in 1923, and was "
    "built again in 1925 with a loan from the bank. The bank of the village was founded in 1899. "
) * 2
SUMMARIES = Path(__file__).parent / "data" / "wikipedia-summaries" / "summaries.jsonl"


def build_sample(folder: Path) -> Path:
    """Index the summaries into a new folder."""
    from specrag.retrieval.build import build

    build([SUMMARIES], folder)
    return folder


def passages_in_order(kb: KnowledgeBase, *places: int) -> list[Passage]:
    """Passages by their places in the summaries; their ids are hashes."""
    return kb.passages(kb._store.rows.ids[list(places)].tolist())


def build_village(folder: Path, model: str, **settings: Any) -> Path:
    """Make a datastore of :data:`VILLAGE`; the settings are those of :func:`specrag.load`."""
    from specrag import load
    from specrag.methods.knn_lm.store.build import build_datastore
    from specrag.methods.knn_lm.store.datastore import model_record

    with closing(load(model, **settings)) as llm:
        tokens = np.array(llm.tokenizer.encode(VILLAGE, special=True), dtype=np.int32)
        build_datastore([tokens], folder, llm.model, model_record(llm.loaded))
    return folder
