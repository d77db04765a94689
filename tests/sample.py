"""A small knowledge base of real text: 24 Wikipedia summaries (tests/data/wikipedia-summaries)."""

from __future__ import annotations

from pathlib import Path

SUMMARIES = Path(__file__).parent / "data" / "wikipedia-summaries" / "summaries.jsonl"


def build_sample(folder: Path) -> Path:
    """Index the summaries into a new folder."""
    from specrag.retrieval.build import build

    build([SUMMARIES], folder)
    return folder
