"""30 documents and 60 questions: the set itself, what the product finds in it, and how answers are counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.documents.__main__ import judge, table
from benchmarks.documents.questions import FILES, KINDS, load_questions
from specrag.methods.evidence import is_about_nothing
from specrag.methods.retriever import similarities
from specrag.retrieval.build import build
from specrag.retrieval.knowledge_base import KnowledgeBase

QUESTIONS = load_questions()


@pytest.fixture(scope="module")
def kb(model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> KnowledgeBase:
    folder = tmp_path_factory.mktemp("documents") / "kb"
    report = build([FILES], folder)
    assert not report.skipped
    return KnowledgeBase.open(folder)


def test_the_set_is_what_it_says() -> None:
    assert len(list(FILES.iterdir())) == 30
    counts = Counter(question.kind for question in QUESTIONS)
    assert counts == dict(zip(KINDS, (20, 8, 8, 4, 4, 4, 12), strict=True))
    assert len({question.identifier for question in QUESTIONS}) == 60
    for question in QUESTIONS:
        assert question.answerable == bool(question.sources) == (question.kind != "unanswerable")
        assert bool(question.history) == (question.kind == "follow-up")
        said = " ".join(" ".join((FILES / name).read_text("utf-8").split()) for name in question.sources)
        assert not question.answerable or any(answer.lower() in said.lower() for answer in question.answers)


def test_what_is_right() -> None:
    asked = {question.identifier: question for question in QUESTIONS}
    assert asked["q05"].is_right("It is two years.")
    assert not asked["q05"].is_right("It is five years.")
    assert asked["q53"].is_right("在中国的保修期为三年。")
    assert not asked["q37"].is_right("It weighs 11.5 kg.")


def test_passages_are_found_and_strange_questions_are_told(kb: KnowledgeBase) -> None:
    """The product without a model: 46 of 48 found among five passages, one of them refused (docs/answering.md)."""
    found, refused = 0, Counter[bool]()
    for question in QUESTIONS:
        words = " ".join([message["content"] for message in question.history[:1]] + [question.question])
        hits = kb.search([words], 5)[0]
        found += bool({Path(hit.passage.source).name for hit in hits} & set(question.sources))
        nothing = is_about_nothing(kb, words, hits, similarities(kb, words, hits), None)
        refused[question.answerable] += nothing
    assert found >= 46
    assert refused[True] <= 1
    assert refused[False] >= 5


def test_records_are_judged_and_counted(kb: KnowledgeBase) -> None:
    asked = {question.identifier: question for question in QUESTIONS}
    record = {"configuration": "a model", "found": [], "unheld": [], "seconds": 2.0}
    records = [
        {
            **record,
            "id": "q01",
            "searched": asked["q01"].question,
            "text": "Ragna Halvorsen.",
            "cited": ["about.md"],
        },
        {
            **record,
            "id": "q02",
            "searched": asked["q02"].question,
            "text": "200 people.",
            "cited": ["about.md"],
        },
        {**record, "id": "q46", "searched": asked["q46"].question, "text": "In water.", "cited": []},
    ]
    shown = table([judge(kb, asked[str(entry["id"])], entry) for entry in records]).splitlines()
    cells = [cell.strip() for cell in shown[2].strip("|").split("|")]
    assert cells[:2] == ["a model", "1 of 2"]
    assert cells[-6:] == ["1 of 2", "1 of 1", "0 of 1", "0 of 1", "1 of 1", "2.0"]
