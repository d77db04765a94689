"""``python -m benchmarks.passages.reuse``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.passages.reuse import CELLS, ask, make_pipelines, table
from specrag.retrieval.knowledge_base import KnowledgeBase
from tests.sample import build_sample

if TYPE_CHECKING:
    from specrag import LanguageModel


def test_all_four_write_the_same(llm: LanguageModel, tmp_path: Path) -> None:
    with KnowledgeBase.open(build_sample(tmp_path / "kb")) as kb:
        answers = ask(make_pipelines(llm, kb), llm, "Who discovered radium?", 1, 12)
    assert list(answers) == [*CELLS[1:], CELLS[0]]
    assert len({text for _, text in answers.values()}) == 1


def test_the_table_tells_how_much_sooner_and_which_texts_differ() -> None:
    same = {cell: (1.0 if cell[1] else 2.0, "a") for cell in CELLS}
    other = {**same, ("ralmspec", False): (2.0, "b")}
    told = table([same, same, other])
    assert "| sequential | 3 | 1.00 | 2.00 | 2.00 [2.00, 2.00] | 2 |" in told
    assert "| ralmspec | 3 |" in told
