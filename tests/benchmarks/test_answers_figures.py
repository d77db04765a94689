"""What ``specrag bench answers`` makes of its records: verdicts, cases, comparisons."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.answers.data import Question
from benchmarks.answers.drafts import SCORINGS, read_drafts, verdicts
from benchmarks.answers.figures import (
    PLAIN,
    SEPARATOR,
    SPECULATIVE,
    STANDARD,
    Case,
    cases,
    grouped,
    pooled,
    separated,
    summarise,
    tuning,
    unchanged,
)
from benchmarks.answers.pictures import draw
from specrag.bench.load import ProcessorLoad
from specrag.bench.machine import describe_machine
from specrag.bench.measurement import OVERALL
from specrag.bench.records import Outcome, Record, RecordKey, RecordStore
from specrag.bench.suite import BenchContext
from specrag.methods.speculative_rag.task import Task
from tests.bench.quiet import Silent


def draft(right: bool, *totals: float, words: int = 10, count: int = 4) -> dict[str, Any]:
    names = ("rationale", "answer", "self_contain", "self_reflect")
    measured = dict(zip(names, ([total, count] for total in totals), strict=True)) if totals else None
    return {
        "answer": "x",
        "right": right,
        "measured": measured,
        "sources": [1, 3],
        "words": words,
        "passage_words": 90,
    }


LINE = json.dumps(
    {
        "text": "x",
        "drafts": [
            draft(False, -1.0, -1.0, -30.0, -1.0),
            draft(True, -2.0, -2.0, -8.0, -0.5, words=30),
            draft(False),
        ],
    }
)


def test_other_verdicts_are_read_from_the_drafts() -> None:
    found = verdicts(read_drafts(LINE), seed=0)
    assert found["product-all"] == 1.0
    assert found["drafter-alone"] == found["mean-drafter-alone"] == found["product-drafter-alone"] == 0.0
    assert found["product-self-contain-alone"] == found["mean-self-reflect-alone"] == 1.0
    assert found["oracle"] == 1.0
    assert {verdicts(read_drafts(LINE), seed=seed)["random-draft"] for seed in range(20)} == {0.0, 1.0}


def test_votes_and_ranks_overrule_a_score() -> None:
    alone = draft(False, -1.0, -1.0, -8.0, -1.0) | {"answer": "Poet", "sources": [4, 5]}
    agreed = [
        draft(True, -1.0, -1.0, -8.4, -1.0) | {"answer": answer, "sources": sources}
        for answer, sources in (("the painter.", [2, 6]), ("Painter", [7, 3]))
    ]
    found = verdicts(read_drafts(json.dumps({"drafts": [alone, *agreed]})), seed=0, ranked=True)
    assert found["product-all"] == found["mean-all"] == 0.0
    assert found["product-voted"] == found["mean-voted"] == 1.0
    assert found["mean-ranked"] == 1.0  # 1/2 + 1/6 against 1/4 + 1/5
    far = [alone | {"sources": [1, 2]}, *agreed]
    assert verdicts(read_drafts(json.dumps({"drafts": far})), seed=0, ranked=True)["mean-ranked"] == 0.0


def test_ranks_count_where_there_are_some_and_no_draft_is_no_verdict() -> None:
    assert set(verdicts([], seed=0).values()) == {0.0}
    names = verdicts(read_drafts(LINE), seed=0).keys()
    assert "mean-voted" in names
    assert not any("ranked" in name for name in names)


def test_a_factor_that_was_not_measured_gives_no_verdict() -> None:
    unverified = draft(True, -1.0, -1.0, 0.0, 0.0)
    unverified["measured"] |= {"self_contain": None, "self_reflect": None}
    found = verdicts(read_drafts(json.dumps({"drafts": [unverified]})), seed=0)
    assert found["mean-drafter-alone"] == 1.0
    assert "mean-all" not in found


def test_without_a_usable_draft_every_verdict_is_wrong() -> None:
    found = verdicts(read_drafts(json.dumps({"drafts": [draft(False)]})), seed=0)
    assert set(found.values()) == {0.0}


def record(
    task: str, model: str, row: str, method: str, correct: float, seconds: float, **more: Any
) -> Record:
    outcome = Outcome(seconds=seconds, correct=correct, **more)
    key = RecordKey(task=task, row=f"{model}{SEPARATOR}{row}", method=method, repeat=0)
    return Record(suite="answers", version="1", setting="s", key=key, outcome=outcome)


def speculative(task: str, row: str, correct: float, method: str = SPECULATIVE, **figures: float) -> Record:
    return record(task, "d + v", row, method, correct, 4.0, output=LINE, figures=figures)


def test_records_become_cases() -> None:
    failed = Record(
        suite="answers",
        version="1",
        setting="s",
        key=RecordKey(task="popqa", row=f"v{SEPARATOR}9", method=STANDARD, repeat=0),
        error="it broke",
    )
    found = cases([speculative("popqa", "1", 1.0, verification_ms=1000.0), failed])
    by_method = {(case.task, case.method): case for case in found}
    assert by_method["popqa", SPECULATIVE].seconds == 4.0
    assert by_method["popqa", SPECULATIVE].figures["rationale_words"] == pytest.approx(50 / 3)
    assert by_method["popqa", SPECULATIVE].row == "popqa 1"
    assert by_method["popqa", f"{SPECULATIVE}+drafter-alone"].seconds == 3.0
    assert by_method["popqa", f"{SPECULATIVE}+oracle"].seconds is None
    ours = {f"{size}-{name}" for size in ("mean", "product") for name in ("ranked", "voted", "voted-ranked")}
    scored = {case.method.removeprefix(f"{SPECULATIVE}+") for case in found if case.task == "scores/popqa"}
    assert scored == SCORINGS.keys() | ours
    assert len(cases([speculative("drafts/popqa", "1", 1.0, f"{SPECULATIVE}+m=1")])) == 1


def test_free_text_is_compared_word_by_word_too(tmp_path: Path) -> None:
    said = "The element is tin [1], and not the lead that was asked for elsewhere [2]."
    line = json.dumps({**json.loads(LINE), "text": "a tin metal"})
    standard = [record("popqa", "v", row, STANDARD, 1.0, 2.0, output=said) for row in "12"]
    drafted = [record("popqa", "d + v", row, SPECULATIVE, 1.0, 4.0, output=line) for row in "12"]
    claim = record("healthver", "v", "1", STANDARD, 1.0, 2.0, output="A")
    asked = {
        "popqa 1": asking("popqa", Task("?"), "tin"),
        "popqa 2": asking("popqa", Task("?"), "lead", "the tin metal"),
    }
    found = cases([*standard, *drafted, claim], asked)
    figures = {(case.method, case.row): case.figures for case in found if case.task in ("popqa", "healthver")}
    assert figures[STANDARD, "popqa 1"] == {
        "answer_words": 13.0,
        "f1": pytest.approx(2 / 12),
        "f1_first_sentence": pytest.approx(2 / 12),
        "right_first_sentence": 1.0,
    }
    assert figures[STANDARD, "healthver 1"] == {}
    assert [figures[SPECULATIVE, f"popqa {row}"]["f1"] for row in "12"] == [pytest.approx(2 / 3), 1.0]
    measured = summarise(context_for(tmp_path), found, "v")
    one = next(each for each in measured if (each.task, each.method) == ("popqa", SPECULATIVE))
    assert one.extra["f1"] == pytest.approx(5 / 6)
    assert one.extra["f1_difference_points"] == pytest.approx(100 * (5 / 6 - 1 / 6))


def asking(name: str, task: Task, *answers: str) -> Question:
    return Question(set=name, identifier="1", task=task, answers=answers, passages=())


def test_a_first_sentence_is_judged_beside_the_whole_text() -> None:
    said = "Dr. Curie found it in 1.5 years [1]. She was born in Warsaw, says 2. And so on."
    found = cases(
        [record("popqa", "v", "1", STANDARD, 1.0, 2.0, output=said)],
        {"popqa 1": asking("popqa", Task("Where?"), "Warsaw")},
    )
    figures = found[0].figures
    assert figures["right_first_sentence"] == figures["f1_first_sentence"] == 0.0
    assert figures["f1"] > 0
    first = {"popqa 1": asking("popqa", Task("Who?"), "Curie")}
    before = cases([record("popqa", "v", "1", STANDARD, 1.0, 2.0, output="It was Curie. Not Warsaw.")], first)
    assert before[0].figures["right_first_sentence"] == 1.0


def test_who_always_names_the_commonest_label_gains_nothing(tmp_path: Path) -> None:
    claims = Task("It rains.", "claim-checking", labels=("True", "False"))
    gold = ["True", "True", "True", "False"]
    asked = {f"healthver {row}": asking("healthver", claims, label) for row, label in enumerate(gold)}
    said = {"always": ["True"] * 4, "better": ["True", "True", "False", "False"]}
    records = [
        record("healthver", name, str(row), STANDARD, float(label == right), 2.0, output=f"{label}.")
        for name, labels in said.items()
        for row, (label, right) in enumerate(zip(labels, gold, strict=True))
    ]
    measured = summarise(context_for(tmp_path), cases(records, asked), "v")
    by_model = {entry.model: entry for entry in measured}
    assert by_model["always"].accuracy == by_model["better"].accuracy == 0.75
    assert (by_model["always"].extra["balanced_accuracy"], by_model["always"].extra["matthews"]) == (0.5, 0.0)
    assert by_model["better"].extra["balanced_accuracy"] == pytest.approx((2 / 3 + 1) / 2)
    assert by_model["better"].extra["matthews"] == pytest.approx(1 / 3**0.5)


def test_the_frontier_is_drawn(tmp_path: Path) -> None:
    records = [
        record("popqa", name, "1", STANDARD, right, seconds, output="tin")
        for name, right, seconds in (("small", 0.0, 1.0), ("large", 1.0, 4.0))
    ]
    measured = summarise(context_for(tmp_path), cases(records), "large")
    assert {path.name for path in draw(measured, tmp_path)} == {
        "answers-accuracy.png",
        "answers-frontier.png",
    }
    assert (tmp_path / "answers-frontier.png").stat().st_size > 5000


def test_answers_with_their_rationales_are_compared_with_standard_ones(tmp_path: Path) -> None:
    standard = [
        record("popqa", "v", row, STANDARD, right, 2.0, output="tin")
        for row, right in zip("12", (1, 0), strict=True)
    ]
    drafted = [speculative("popqa", row, 0.0, right_with_rationale=1.0) for row in "12"]
    measured = summarise(context_for(tmp_path), cases([*standard, *drafted]), "v")
    one = next(each for each in measured if (each.task, each.method) == ("popqa", SPECULATIVE))
    assert one.extra["right_with_rationale"] == 1.0
    assert (one.extra["difference_points"], one.extra["with_rationale_difference_points"]) == (-50.0, 50.0)
    assert 0 <= float(one.extra["with_rationale_difference_low"] or 0) <= 50
    alone = next(each for each in measured if each.method == f"{SPECULATIVE}+oracle")
    assert "with_rationale_difference_points" not in alone.extra


@pytest.mark.parametrize("before", [1.0, None])
def test_a_rationale_that_counts_is_compared_with_one_that_counts(
    tmp_path: Path, before: float | None
) -> None:
    figures = {} if before is None else {"right_with_rationale": before}
    untuned = [
        record("popqa", "d + v", row, SPECULATIVE, 0.0, 4.0, output=LINE, figures=figures) for row in "12"
    ]
    tuned = [
        record(
            "popqa", "t + v", row, SPECULATIVE, 0.0, 4.0, output=LINE, figures={"right_with_rationale": 0.0}
        )
        for row in "12"
    ]
    measured = tuning(context_for(tmp_path), cases([*untuned, *tuned]), "d + v", ["t + v"])
    (one,) = [each for each in measured if each.method == SPECULATIVE]
    assert one.extra.get("with_rationale_difference_points") == (None if before is None else -100.0)


def test_types_and_separate_machines() -> None:
    found = cases(
        [
            speculative("hotpotqa", "1", 1.0, drafting_ms=3000.0, verification_ms=500.0),
            speculative("drafts/hotpotqa", "1", 1.0, f"{SPECULATIVE}+m=1", drafting_ms=1000.0),
        ]
    )
    (modelled,) = separated(found)
    assert (modelled.task, modelled.seconds) == ("separate machines/hotpotqa", 2.0)
    typed = grouped(found, {"hotpotqa 1": "bridge"})
    assert {case.task for case in typed} == {"types/hotpotqa bridge"}
    assert not grouped(found, {"hotpotqa 1": ""})


def context_for(folder: Path) -> BenchContext:
    return BenchContext(
        suite="answers",
        quick=False,
        data=None,
        out=folder,
        model="d",
        device="cpu",
        repeats=None,
        command="specrag bench answers",
        version="1",
        date="2026-01-01",
        machine=describe_machine(),
        records=RecordStore(folder / "answers.jsonl", suite="answers", version="1", setting="s"),
        clock=time.perf_counter,
        load=ProcessorLoad(),
        progress=Silent(),
    )


def case(task: str, row: int, model: str, method: str, correct: float, seconds: float) -> Case:
    return Case(
        task=task,
        row=f"{task} {row}",
        model=model,
        method=method,
        correct=correct,
        seconds=seconds,
        figures={},
    )


def test_methods_are_compared_with_the_better_standard_prompt(tmp_path: Path) -> None:
    found = []
    for task, shift in (("popqa", 0), ("musique", 1)):
        for row in range(10):
            found += [
                case(task, row, "v", STANDARD, float(row % 2), 10.0),
                case(task, row, "v", PLAIN, float(row < 5 + 3 * shift), 12.0),
                case(task, row, "d + v", SPECULATIVE, float(row < 8), 5.0),
            ]
    measured = {(entry.task, entry.method): entry for entry in summarise(context_for(tmp_path), found, "v")}
    assert {task for task, _ in measured} == {OVERALL, "popqa", "musique"}
    ours = measured["musique", SPECULATIVE]
    assert (ours.baseline, ours.n, ours.accuracy) == (PLAIN, 10, 0.8)
    assert ours.extra["difference_points"] == 0.0
    assert ours.extra["latency_change_percent"] == pytest.approx(100 * (5 / 12 - 1))
    assert ours.speedup == pytest.approx(12 / 5)
    assert measured["musique", PLAIN].baseline is None
    assert measured["popqa", SPECULATIVE].extra["difference_points"] == pytest.approx(30.0)
    whole = measured[OVERALL, SPECULATIVE]
    assert (whole.n, whole.baseline) == (20, PLAIN)
    assert float(whole.extra["accuracy_low"] or 0) < 0.8 < float(whole.extra["accuracy_high"] or 0)
    assert float(whole.extra["difference_low"] or 0) <= float(whole.extra["difference_points"] or 0)
    assert (whole.extra["mean_ms"], whole.extra["p95_ms"]) == (5000.0, 5000.0)


def test_a_method_is_compared_on_the_questions_that_both_have(tmp_path: Path) -> None:
    found = [case("popqa", row, "v", STANDARD, 1.0, 2.0) for row in range(4)]
    found += [case("popqa", row, "d + v", SPECULATIVE, 0.0, 1.0) for row in range(2, 6)]
    ours = next(e for e in summarise(context_for(tmp_path), found, "v") if e.method == SPECULATIVE)
    assert (ours.n, ours.extra["paired"], ours.extra["difference_points"]) == (4, 2, -100.0)


def test_a_tuned_drafter_is_compared_with_the_untuned_one(tmp_path: Path) -> None:
    found = []
    for row in range(8):
        found += [
            case("popqa", row, "v", STANDARD, 1.0, 9.0),
            case("popqa", row, "d + v", SPECULATIVE, float(row % 2), 4.0),
            case("popqa", row, "d (t 1) + v", SPECULATIVE, 1.0, 2.0),
            case("drafts/popqa", row, "d (t 1) + v", SPECULATIVE, 0.0, 2.0),
        ]
    (measured,) = tuning(context_for(tmp_path), found, "d + v", ["d (t 1) + v"])
    assert (measured.task, measured.model, measured.n) == ("tuning/popqa", "d (t 1) + v", 8)
    assert measured.extra["difference_points"] == 50.0
    assert measured.speedup == pytest.approx(2.0)
    assert not tuning(context_for(tmp_path), found, "other", ["d (t 1) + v"])


def test_what_is_not_changed_stands_beside_what_is_on_the_same_questions() -> None:
    found = [case("triviaqa", row, "d + v", SPECULATIVE, float(row % 2), 4.0) for row in range(6)]
    found += [
        replace(found[row], task="drafts/triviaqa", method=f"{SPECULATIVE}+m={m}")
        for row in range(2)
        for m in (1, 10)
    ]
    found.append(replace(found[5], task="scores/triviaqa", method=f"{SPECULATIVE}+mean-all"))
    beside = unchanged(found, ["drafts"])
    assert [(each.task, each.row, each.method) for each in beside] == [
        ("drafts/triviaqa", f"triviaqa {row}", SPECULATIVE) for row in range(2)
    ]


def test_sets_are_pooled_and_some_stand_beside() -> None:
    remedied = f"{SPECULATIVE}+anchored"
    found = cases(
        [
            record("remedies/popqa", "d + v", "1", remedied, 1.0, 4.0, output=LINE),
            record("remedies/musique", "d + v", "1", remedied, 0.0, 4.0, output=LINE),
            speculative("popqa", "1", 0.0),
        ]
    )
    together = pooled(pooled(found, "remedies", ["popqa", "musique"]), "scores", ["popqa"])
    tasks = Counter(each.task for each in together if each.method == remedied)
    assert tasks == {"remedies/all sets": 2, "remedies/popqa": 1, "remedies/musique": 1}
    judged = {each.row for each in together if each.method == f"{remedied}+mean-all"}
    assert judged == {"popqa 1", "musique 1"}
    assert {each.task for each in together if each.method.endswith("mean-all")} == {
        "scores/all sets",
        "scores/popqa",
    }
    assert pooled(found[-1:], "scores", []) == found[-1:]  # one set needs no other name
