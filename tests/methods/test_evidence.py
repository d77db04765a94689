"""When what was found is about nothing that was asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.documents.questions import FILES
from specrag.methods.evidence import is_about_nothing, usual_min_score
from specrag.methods.retriever import GivenPassages, similarities
from specrag.retrieval.build import build
from specrag.retrieval.knowledge_base import KnowledgeBase
from tests.sample import passages_in_order


@pytest.fixture(scope="module")
def kb(model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> KnowledgeBase:
    folder = tmp_path_factory.mktemp("evidence") / "kb"
    build([FILES], folder)
    return KnowledgeBase.open(folder)


def test_the_threshold_grows_with_the_knowledge_base() -> None:
    found = [usual_min_score(count) for count in (1, 2, 45, 1000, 9654, 10**6)]
    assert found == sorted(found)
    assert found == pytest.approx([0.03, 0.134, 0.273, 0.357, 0.407, 0.493], abs=0.001)


@pytest.mark.parametrize(
    ("question", "nothing"),
    [
        ("Who founded the firm?", False),
        ("Which room is Marta Kowal in?", False),  # by its words: the similarity is 0.22
        ("Was kostet die jährliche Wartung?", False),
        ("How do I boil an egg?", True),
        ("What is the capital of Mongolia?", True),
        ("Who won the football world cup in 1990?", True),
    ],
)
def test_questions_about_something_else_are_told(kb: KnowledgeBase, question: str, nothing: bool) -> None:
    hits = kb.search([question], 5)[0]
    similar = similarities(kb, question, hits)
    assert is_about_nothing(kb, question, hits, similar, None) is nothing
    assert is_about_nothing(kb, question, hits, similar, -1.0) is False
    assert is_about_nothing(kb, question, hits, similar, 1.0) is True  # what was asked for decides alone


def test_without_vectors_everything_found_is_about_it(kb: KnowledgeBase) -> None:
    passages = passages_in_order(kb, 0, 1)
    hits = GivenPassages(passages).search(["How do I boil an egg?"], 2)[0]
    assert is_about_nothing(GivenPassages(passages), "How do I boil an egg?", hits, [], None) is False
    assert is_about_nothing(GivenPassages(passages), "What?", [], [], None) is True


def test_words_are_shared_in_the_language_in_which_they_are_most(kb: KnowledgeBase) -> None:
    (hit,) = kb.search(["Was kostet die jährliche Wartung?"], 1)[0]
    assert hit.passage.source.endswith("reinigung.md")
    other = next(id for id in kb.ids.tolist() if id != hit.passage.id)
    held, less = kb.shared_words("Was kostet die jährliche Wartung?", [hit.passage.id, other])
    assert 0.65 < held <= 1
    assert less < 0.5
    assert kb.shared_words("?!", kb.ids[:2].tolist()) == [0.0, 0.0]
