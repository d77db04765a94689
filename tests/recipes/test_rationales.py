"""Rationales for rows: what is asked, what is kept, and runs that end at any moment."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.question_prompts import Rejected
from recipes.rationales import (
    RationaleSettings,
    choose_passages,
    follows,
    rationale_request,
    read_rationale,
    write_rationales,
)
from recipes.rows import CARD, REJECTED
from specrag.errors import EndpointUnavailable, InputError
from specrag.language_model import LanguageModel
from specrag.methods.generator import LocalGenerator
from specrag.methods.speculative_rag.form import ParsedDraft, read_draft, write_draft
from specrag.methods.speculative_rag.task import CLAIM_LABELS, Task
from specrag.models.roles import TextRequest
from specrag.retrieval.passage import Passage
from specrag.training.drafter.rows import GOLD, DrafterRow, read_rows
from tests.recipes.rule_writer import RuleWriter, carver, last, title

SETTINGS = RationaleSettings(passages=3, batch=4)


def passage(number: int, *, gold: bool = False) -> Passage:
    text = f"The {title(number)} was carved by {carver(number)} in {1800 + number}."
    return Passage(number, "x", title(number), "", text, {GOLD: True} if gold else {})


def row(number: int) -> DrafterRow:
    """A question with its passage and five others."""
    passages = (passage(number, gold=True), *(passage(number + beside) for beside in range(1, 6)))
    return DrafterRow(f"r{number}", Task(f"Who carved the {title(number)}?"), carver(number), passages)


ROWS = [row(number) for number in range(0, 60, 6)]


def quotes(request: TextRequest) -> str:
    """The evidence as rationale, and from that the answer; for every third row another answer."""
    said = last(request)
    number = int(said.split("ville ")[-1].split("?")[0])
    if request.lead == "Answer:":
        return " somebody" if number % 18 == 0 else f" {carver(number)}."
    return f" The {title(number)} was carved by {carver(number)} in {1800 + number}."


def test_rationales_are_kept_where_the_answer_follows(tmp_path: Path) -> None:
    writer = RuleWriter(quotes)
    run = write_rationales(writer, ROWS, tmp_path / "out", SETTINGS, command="specrag train ...")
    made = {each.identifier: each for each in read_rows([tmp_path / "out"])}
    turned_down = [json.loads(line) for line in (tmp_path / "out" / REJECTED).read_text().splitlines()]
    assert [line["id"] for line in turned_down] == ["r0", "r18", "r36", "r54"]
    assert all("somebody" in line["text"] for line in turned_down)
    assert len(made) == 6
    for given in ROWS:
        if given.identifier in made:
            got = made[given.identifier]
            assert (got.task, got.answer) == (given.task, given.answer)
            assert got.rationale is not None
            draft = read_draft(got.task, write_draft(got.rationale, got.answer))
            assert isinstance(draft, ParsedDraft)
            assert (draft.rationale, draft.answer) == (got.rationale, got.answer)
            assert {each.text for each in got.passages} <= {each.text for each in given.passages}
            assert len(got.passages) <= 3
            assert got.evidence[0].text == given.passages[0].text
    card = json.loads((tmp_path / "out" / CARD).read_text())
    assert (card["rows"], card["rejected"], card["rejection_rate"]) == (6, 4, 0.4)
    assert card["reasons"] == {"the answer does not follow from it": 4}
    assert card == json.loads(json.dumps(run.card))
    # What is asked again is asked without a passage.
    checks = [request for request in writer.requests if request.lead == "Answer:"]
    assert len(checks) == len(ROWS)
    assert all(last(request).count("in 18") == 1 for request in checks)  # in the note


def test_passages_are_dealt_with_their_evidence_in_any_order() -> None:
    dealt = [
        choose_passages(each, replace(SETTINGS, passages=4, seed=seed)) for each in ROWS for seed in range(8)
    ]
    assert {len(each.passages) for each in dealt} == {1, 2, 3, 4}
    places = {[bool(one.metadata) for one in each.passages].index(True) for each in dealt}
    assert places == {0, 1, 2, 3}
    assert choose_passages(ROWS[0], SETTINGS) == choose_passages(ROWS[0], SETTINGS)
    # Without a mark, what holds the answer is the evidence; a claim has none then.
    bare = replace(ROWS[0], passages=tuple(replace(one, metadata={}) for one in ROWS[0].passages))
    assert all(carver(0) in " ".join(one.text for one in choose_passages(bare, replace(SETTINGS, seed=seed)).passages)
               for seed in range(20))  # fmt: skip
    claim = replace(bare, task=Task("It is so.", "claim-checking", labels=CLAIM_LABELS), answer="SUPPORTED")
    assert 1 <= len(choose_passages(claim, SETTINGS).passages) <= 3
    lone = replace(ROWS[0], passages=ROWS[0].passages[:1])
    assert choose_passages(lone, SETTINGS).passages == lone.passages


@pytest.mark.parametrize("everything", [False, True])
def test_the_writer_sees_the_evidence_or_all(tmp_path: Path, everything: bool) -> None:
    writer = RuleWriter(quotes)
    settings = replace(SETTINGS, all_passages=everything, check=False)
    run = write_rationales(writer, ROWS, tmp_path, settings)
    assert len(writer.requests) == len(run.rows) == len(ROWS)
    for request, made in zip(writer.requests, run.rows, strict=True):
        said = last(request)
        assert said.count(" was carved by ") == (len(made.passages) if everything else 1)
        assert said.endswith(f"Right answer: {made.answer}")
    assert max(len(made.passages) for made in run.rows) == 3


@pytest.mark.parametrize(
    ("text", "cut", "found"),
    [
        (
            " The Great heron was carved by Anna Berg. \nMore",
            False,
            "The Great heron was carved by Anna Berg.",
        ),
        (
            " The Great heron was carved by Anna Berg. It stands",
            True,
            "The Great heron was carved by Anna Berg.",
        ),
        (" The Great heron was carved by", True, "no rationale"),
        (" Anna Berg.", False, "no rationale"),
        (" The passage says that the Great heron was carved.", False, "The Great heron was carved."),
        (" So it is, the passage says.", False, "it speaks of passages, options or the answer"),
        (
            " Anna Berg carved the Great heron with friends and family.",
            False,
            "it does not quote the passages",
        ),
        (" Everybody knows famous sculptors: Michelangelo, Rodin.", False, "it does not quote the passages"),
    ],
)
def test_only_quotes_are_read(text: str, cut: bool, found: str) -> None:
    read = read_rationale(ROWS[0], ROWS[0].passages[:1], text, cut=cut)
    assert read in (found, Rejected(found))


@pytest.mark.parametrize(
    ("task", "answer", "text", "right"),
    [
        (Task("Who?"), "Anna Berg", " It was Anna Berg.", True),
        (Task("Who?"), "Anna Berg", " It was Ben Berg.", False),
        (Task("How many?"), "31", " 310", False),
        (Task("Who?", "multiple-choice", {"A": "Ben", "B": "Anna"}), "B", " B. Anna", True),
        (Task("Who?", "multiple-choice", {"A": "Ben", "B": "Anna"}), "B", " Anna", True),
        (Task("Who?", "multiple-choice", {"A": "Ben", "B": "Anna"}), "B", " A", False),
        (Task("Who?", "multiple-choice", {"A": "Ben", "B": "Anna"}), "B", " unknown", False),
        (Task("So.", "claim-checking", labels=("True", "False")), "False", " False.", True),
        (Task("So.", "claim-checking", labels=("True", "False")), "False", " True", False),
    ],
)
def test_what_follows_is_equal_or_contains_it(task: Task, answer: str, text: str, right: bool) -> None:
    assert follows(DrafterRow("a", task, answer, (passage(0),)), text) == right


@pytest.mark.parametrize("label", CLAIM_LABELS)
def test_the_writer_is_told_what_a_label_says(label: str) -> None:
    claim = DrafterRow("a", Task("So.", "claim-checking", labels=CLAIM_LABELS), label, (passage(0),))
    assert f"Right answer: {label} (the passages " in last(rationale_request(claim, claim.passages))


def test_a_dead_writer_loses_a_batch_and_the_run_goes_on(tmp_path: Path) -> None:
    write_rationales(RuleWriter(quotes), ROWS, tmp_path / "whole", SETTINGS)
    with pytest.raises(EndpointUnavailable, match="it went away"):
        write_rationales(RuleWriter(quotes, lives=13), ROWS, tmp_path / "out", SETTINGS)
    assert [each.identifier for each in read_rows([tmp_path / "out"])] == ["r6", "r12"]
    again = RuleWriter(quotes)
    write_rationales(again, ROWS, tmp_path / "out", SETTINGS)
    assert len(again.requests) == 12
    for name in ("rows.jsonl", REJECTED):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_rows_may_be_added_but_not_changed(tmp_path: Path) -> None:
    write_rationales(RuleWriter(quotes), ROWS[:4], tmp_path / "out", SETTINGS)
    run = write_rationales(RuleWriter(quotes), ROWS, tmp_path / "out", SETTINGS)
    assert len(run.rows) == 6
    changed = [replace(ROWS[1], answer="Another One"), *ROWS[2:]]
    with pytest.raises(InputError, match=r"r6.*another row of this id"):
        write_rationales(RuleWriter(quotes), changed, tmp_path / "out", SETTINGS)
    with pytest.raises(InputError, match="passages 3 there, 2 here"):
        write_rationales(RuleWriter(quotes), ROWS, tmp_path / "out", replace(SETTINGS, passages=2))


def test_a_model_writes_rationales(exact_llm: LanguageModel, tmp_path: Path) -> None:
    """A small model quotes when it is shown how; whether an answer follows is beyond it."""
    settings = replace(SETTINGS, check=False)
    run = write_rationales(LocalGenerator(exact_llm), ROWS[:3], tmp_path / "out", settings)
    assert len(run.rows) + sum(run.rejected.values()) == 3
    assert run.rows
    for made in run.rows:
        assert made.rationale is not None
        assert title(int(made.identifier[1:])) in made.rationale
