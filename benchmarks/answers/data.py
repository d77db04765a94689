"""The sets of the answers suite: questions, choices and claims, each with passages and what counts as right."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.answers.passage_reading import choose
from benchmarks.questions import SAMPLE, SAMPLE_PASSAGES, PassageQuestion, load_passage_questions
from benchmarks.rag.questions import SETS, load_found
from specrag.bench.data import find_file, read_json_lines
from specrag.bench.metrics import contains_answer, normalize_answer
from specrag.methods.speculative_rag.task import CLAIM_LABELS, Task
from specrag.retrieval.passage import Passage, passage_text

if TYPE_CHECKING:
    from specrag.retrieval.encoder.encoder import Encoder

#: Most rows of a set.
ROWS = 100

_SUPPORTED, _REFUTED, _UNKNOWN = CLAIM_LABELS
_TRUE, _FALSE = "True", "False"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A row of a set.

    Attributes:
        set: the set's name.
        identifier: unique in the set.
        group: of questions within the set, such as HotpotQA's types; empty where there are none.
        answers: what counts as right.
        passages: best first, no two alike; as many as the set's size asks for, once they are ranked.
    """

    set: str
    identifier: str
    task: Task
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]
    group: str = ""

    def is_right(self, text: str) -> bool:
        """Whether an answer is right: free text if it contains a gold answer, a choice if it is the gold one.

        The whole of a yes-no answer is its first word: "no" stands in "not" and in "novel".
        """
        if self.task.kind != "free-form":
            return self.choice(text) in self.answers
        if set(self.answers) <= {"yes", "no"}:
            return normalize_answer(text).split(" ")[0] in self.answers
        return contains_answer(text, self.answers)

    def choice(self, text: str) -> str:
        """The option or label that an answer names first; empty if none."""
        return choose(self.task, text)

    def is_in(self, numbers: Sequence[int]) -> bool | None:
        """Whether passages hold a gold answer, word for word; ``None`` where answers are not looked for in them.

        Args:
            numbers: of passages, from 1.
        """
        if self.task.kind != "free-form" or set(self.answers) <= {"yes", "no"}:
            return None
        texts = [self.passages[number - 1] for number in numbers]
        return any(contains_answer(f"{passage.title}\n{passage.text}", self.answers) for passage in texts)


@dataclass(frozen=True, kw_only=True)
class SetSize:
    """What the paper gives a set's questions (section 4.1).

    Args:
        passages: n; fewer where the data has fewer.
        m, k: drafts, and passages a draft.
        retrieved: whether passages come in a retriever's order; else in no order, or in that of a text.
    """

    passages: int = 10
    m: int = 5
    k: int = 2
    retrieved: bool = False


_SINGLE_HOP, _RETRIEVED = SetSize(), SetSize(retrieved=True)
_FOUND = SetSize(passages=20, m=10, retrieved=True)
_MULTI_HOP = SetSize(passages=15, m=10, k=6)
SIZES: Mapping[str, SetSize] = {
    "popqa": _RETRIEVED,
    "popqa-25": _RETRIEVED,
    "triviaqa": _RETRIEVED,
    "musique": _MULTI_HOP,
    "hotpotqa": _MULTI_HOP,
    "arc-challenge": _SINGLE_HOP,
    "healthver": _SINGLE_HOP,
    "climate-fever": _SINGLE_HOP,
    **{f"{name}-corpus": _FOUND for name in SETS},
    "sample": SetSize(m=2),
}
"""By name; ``popqa-25`` is PopQA with up to 25 retrieved passages, of which the first 10 are used; a ``-corpus`` has
the 20 that BM25 finds among 68,980, as the paper's questions have what their retriever finds."""


def load_sets(
    folder: Path | None, names: Sequence[str], rows: int = ROWS, encoder: Encoder | None = None
) -> dict[str, list[Question]]:
    """Rows of each set, drawn by their identifiers; the built-in sample without data.

    Files are ordered, and their first rows alike. Whoever asks for more rows gets the same ones and others. Passages
    that no retriever has ranked are ranked by their similarity with the question, before the last ones are left out.

    Args:
        encoder: ranks; by default the one that knowledge bases have.

    Raises:
        InputError: a file is missing or of another form.
    """
    if folder is None:
        return {"sample": list(_sample())[:rows]}
    drawn = {name: sorted(_LOADERS[name](folder), key=_place)[:rows] for name in names}
    if encoder is None and not all(SIZES[name].retrieved for name in names):
        from specrag.retrieval.encoder.encoder import load_encoder  # it imports torch

        encoder = load_encoder()
    return {name: [_best(question, encoder) for question in questions] for name, questions in drawn.items()}


def _best(question: Question, encoder: Encoder | None) -> Question:
    """The question with its best passages, best first."""
    size, passages = SIZES[question.set], question.passages
    if not size.retrieved and encoder is not None:
        texts = [passage_text(passage.title, passage.text) for passage in passages]
        scores = encoder.encode_passages(texts) @ encoder.encode_queries([question.task.text])[0]
        passages = tuple(passages[place] for place in np.argsort(-scores, kind="stable"))
    return replace(question, passages=passages[: size.passages])


def _place(question: Question) -> bytes:
    return hashlib.sha256(question.identifier.encode()).digest()


def _popqa(folder: Path) -> list[Question]:
    rows = load_passage_questions(find_file(folder, "popqa_dev_500x5.jsonl"))
    return [_free_form("popqa", row) for row in rows if row.answerable]


def _retrieval_qa(name: str, prefix: str) -> Callable[[Path], list[Question]]:
    def load(folder: Path) -> list[Question]:
        rows = load_passage_questions(find_file(folder, "retrievalqa_popqa_trivia_100x25.jsonl"))
        return [_free_form(name, row) for row in rows if row.identifier.startswith(prefix)]

    return load


def _musique(folder: Path) -> list[Question]:
    path = find_file(folder, "musique_dev_100x20.jsonl")
    return [_free_form("musique", row) for row in load_passage_questions(path)]


def _hotpotqa(folder: Path) -> list[Question]:
    path = find_file(folder, "hotpotqa_dev_100x10.jsonl")
    kinds = [str(row.get("type", "")) for row in read_json_lines(path)]
    rows = load_passage_questions(path)
    return [_free_form("hotpotqa", row, kind) for row, kind in zip(rows, kinds, strict=True)]


def _free_form(name: str, row: PassageQuestion, group: str = "") -> Question:
    return Question(
        set=name,
        identifier=row.identifier,
        task=Task(row.question),
        answers=row.answers,
        passages=_distinct(row.passages),
        group=group,
    )


def _corpus(name: str) -> Callable[[Path], list[Question]]:
    def load(folder: Path) -> list[Question]:
        return [
            Question(
                set=f"{name}-corpus",
                identifier=row.identifier,
                task=Task(row.question),
                answers=row.answers,
                passages=_distinct(row.passages),
            )
            for row in load_found(folder, _FOUND.passages)
            if row.set == name
        ]

    return load


def _arc(folder: Path) -> list[Question]:
    questions = []
    for row in read_json_lines(find_file(folder, "arc_challenge_evidence.jsonl")):
        options, evidence = _mapping(row["choices"]), str(row["evidence"])
        if not options or not evidence.strip():
            continue
        title, _, text = evidence.rpartition(" // ")
        questions.append(
            Question(
                set="arc-challenge",
                identifier=str(row["id"]),
                task=Task(str(row["question"]), "multiple-choice", options),
                answers=(str(row["answer"]),),
                passages=_cut(title, text or evidence),
            )
        )
    return questions


def _healthver(folder: Path) -> list[Question]:
    """Claims that their evidence supports or refutes; the label is that of the larger part of it."""
    questions = []
    for number, row in enumerate(read_json_lines(find_file(folder, "healthver_test.jsonl")), 1):
        found = [_mapping(entry) for entry in row["evidences"]]  # type: ignore[attr-defined]
        labels = Counter(entry["label"] for entry in found)
        supports, refutes = labels["Supports"], labels["Refutes"]
        if supports == refutes:
            continue
        passages = [
            Passage(place, "healthver", "", str(number), entry["evidence"], {})
            for place, entry in enumerate(found)
        ]
        questions.append(
            Question(
                set="healthver",
                identifier=str(number),
                task=Task(str(row["claim"]), "claim-checking", labels=(_TRUE, _FALSE)),
                answers=(_TRUE if supports > refutes else _FALSE,),
                passages=_distinct(passages),
            )
        )
    return questions


def _climate_fever(folder: Path) -> list[Question]:
    gold = {"SUPPORTS": _SUPPORTED, "REFUTES": _REFUTED, "NOT_ENOUGH_INFO": _UNKNOWN}
    questions = []
    for row in read_json_lines(find_file(folder, "climate_fever_300.jsonl")):
        if row["claim_label"] not in gold:  # disputed
            continue
        passages = [
            Passage(place, "climate-fever", entry["article"], "", entry["evidence"], {})
            for place, entry in enumerate(map(_mapping, row["evidences"]))  # type: ignore[call-overload]
        ]
        questions.append(
            Question(
                set="climate-fever",
                identifier=str(row["claim_id"]),
                task=Task(str(row["claim"]), "claim-checking", labels=CLAIM_LABELS),
                answers=(gold[str(row["claim_label"])],),
                passages=_distinct(passages),
            )
        )
    return questions


_LOADERS: Mapping[str, Callable[[Path], list[Question]]] = {
    "popqa": _popqa,
    "popqa-25": _retrieval_qa("popqa-25", "popqa"),
    "triviaqa": _retrieval_qa("triviaqa", "triviaqa"),
    "musique": _musique,
    "hotpotqa": _hotpotqa,
    "arc-challenge": _arc,
    "healthver": _healthver,
    "climate-fever": _climate_fever,
    **{f"{name}-corpus": _corpus(name) for name in SETS},
}


def _sample() -> tuple[Question, ...]:
    choice = Task(
        "Which of these makes a pencil write harder?",
        "multiple-choice",
        {"A": "more graphite", "B": "more clay", "C": "more wood"},
    )
    claim = Task("The Danube ends in the Black Sea.", "claim-checking", labels=(_TRUE, _FALSE))
    return (
        _free_form("sample", SAMPLE[1]),
        Question(set="sample", identifier="choice", task=choice, answers=("B",), passages=SAMPLE_PASSAGES),
        Question(set="sample", identifier="claim", task=claim, answers=(_TRUE,), passages=SAMPLE_PASSAGES),
    )


def _distinct(passages: Sequence[Passage]) -> tuple[Passage, ...]:
    """The passages of different texts, as all methods get them."""
    texts: dict[str, Passage] = {}
    for passage in passages:
        if passage.text.strip():
            texts.setdefault(" ".join(passage.text.split()), passage)
    return tuple(texts.values())


_SENTENCES_A_PASSAGE = 2


def _cut(title: str, text: str) -> tuple[Passage, ...]:
    """One long passage as several of two sentences each, so that drafts can differ."""
    sentences = [sentence.strip() for sentence in text.replace("? ", "?. ").split(". ") if sentence.strip()]
    groups = [
        ". ".join(sentences[start : start + _SENTENCES_A_PASSAGE])
        for start in range(0, len(sentences), _SENTENCES_A_PASSAGE)
    ]
    passages = [Passage(number, "arc", title, "", group, {}) for number, group in enumerate(groups)]
    return _distinct(passages)


def _mapping(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}
