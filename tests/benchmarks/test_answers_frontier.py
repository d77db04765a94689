"""What a cascade would have done is made of what was run, and the table says who answered what."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.answers import frontier
from benchmarks.answers.data import load_sets
from benchmarks.answers.frontier_figures import BASELINE, CONTROL, by_way, draw, label_table, spared, table
from benchmarks.rag import longbench

LONG = {"passages": 10, "characters": 2400}


def record(way: str, number: int, right: bool, seconds: float, **more: Any) -> dict[str, Any]:
    told = {"set": "popqa", "id": str(number), "row": 2 * number, "n": 5, "way": way}
    return {**told, "right": right, "held": right, "seconds": seconds, **more}


def drafted(number: int, right: bool, confidence: float) -> dict[str, Any]:
    return record("cascade", number, right, 1.0, confidence=confidence, phases={"check": 0.5})


RECORDS = [
    *(record(BASELINE, number, right, 4.0) for number, right in enumerate((True, True, False))),
    *(record(CONTROL, number, number < 1, 0.2) for number in range(3)),
    drafted(0, True, 0.95),
    drafted(1, False, 0.6),
    drafted(2, True, 0.75),
    record("cascade, doubted", 0, True, 4.6),  # and not 5.0
]


def test_what_a_doubt_spares_is_measured() -> None:
    assert spared(RECORDS) == pytest.approx(0.8)
    assert spared([one for one in RECORDS if one["way"] != "cascade, doubted"]) == 0.0


def test_a_cascade_takes_what_is_probable_enough_and_pays_for_the_rest() -> None:
    ways = by_way(RECORDS, (0.7, 0.9))
    assert set(ways) == {BASELINE, CONTROL, "cascade at 0.7", "cascade at 0.9"}
    lenient = [ways["cascade at 0.7"]["popqa", str(number)] for number in range(3)]
    assert [one.right for one in lenient] == [True, True, True]  # the second by the large model
    assert [one.seconds for one in lenient] == pytest.approx([1.0, 4.6, 1.0])
    strict = [ways["cascade at 0.9"]["popqa", str(number)] for number in range(3)]
    assert [one.right for one in strict] == [True, True, False]
    assert [one.seconds for one in strict] == pytest.approx([1.0, 4.6, 4.6])


def test_a_cascade_over_the_best_passages_doubts_towards_their_answer() -> None:
    best = [record("large, best 5", number, number == 1, 2.0) for number in range(3)]
    few = [{**one, "way": "cascade, best 5"} for one in RECORDS if one["way"] == "cascade"]
    found = by_way([*RECORDS, *best, *few], (0.9,))
    assert {"cascade at 0.9", "cascade, best 5 at 0.9"} < set(found)
    strict = [found["cascade, best 5 at 0.9"]["popqa", str(number)] for number in range(3)]
    assert [one.right for one in strict] == [True, True, False]
    assert [one.seconds for one in strict] == pytest.approx([1.0, 2.6, 2.6])
    assert "cascade, best 5 at 0.9" not in by_way([*RECORDS, *few], (0.9,))  # nobody knows what it would say


def test_the_table_compares_question_by_question() -> None:
    lines = {line.split(" | ")[1]: line for line in table(RECORDS).splitlines()[2:]}
    assert "| 3 | 66.7 % |" in lines[BASELINE]
    assert "| 3 | 33.3 % | -33.3 [" in lines[CONTROL]
    assert "| 0.20 | 0.05 |" in lines[CONTROL]
    assert "| 3 | 100.0 % | +33.3 [" in lines["cascade at 0.7"]
    assert "| 2.20 | 0.55 |" in lines["cascade at 0.7"]


def test_a_label_that_is_always_named_gains_nothing() -> None:
    gold = ["SUPPORTS", "SUPPORTS", "REFUTES"]
    claims = [
        {**record(way, number, said == label, 1.0), "set": "healthver", "said": said, "gold": label}
        for way, labels in (("large", ["SUPPORTS"] * 3), ("drafts", ["SUPPORTS", "REFUTES", "REFUTES"]))
        for number, (said, label) in enumerate(zip(labels, gold, strict=True))
    ]
    assert label_table([*RECORDS, *claims]).splitlines()[2:] == [
        "| healthver | large | 3 | 66.7 % | 50.0 % | 0.00 |",
        "| healthver | drafts | 3 | 66.7 % | 75.0 % | 0.50 |",
    ]
    assert label_table(RECORDS) == ""


def test_a_question_that_a_way_has_not_answered_is_no_part_of_the_picture(tmp_path: Path) -> None:
    path = draw(RECORDS, tmp_path / "frontier.png")
    assert path is not None
    assert path.stat().st_size > 5_000
    others = [record("drafts", number, True, 1.0) for number in (7, 8)]
    assert draw([*RECORDS, others[0]], tmp_path / "few.png") is not None  # of a way that was hardly run
    assert draw([*RECORDS, *others], tmp_path / "none.png") is None


@pytest.mark.parametrize(("part", "rows"), [("odd", [1, 3]), ("even", [0, 2]), ("all", [0, 1, 2, 3])])
def test_parts_are_rows_of_each_set_in_turn(
    part: str, rows: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["frontier", str(tmp_path), "--data", str(tmp_path), "--rows", "4", "--part", part]
    monkeypatch.setattr(sys, "argv", [*words, "--sets", "sample", "longbench"])
    free, *_ = questions = load_sets(None, ["sample"])["sample"]
    monkeypatch.setattr(longbench, "load_sets", lambda *_: {"sample": questions})
    long = [replace(free, set="longbench", identifier=str(number)) for number in range(5)]
    monkeypatch.setattr(longbench, "load", lambda _, *size: long if size == tuple(LONG.values()) else [])
    asked = list(frontier._questions(frontier._arguments()))
    assert [row for question, row in asked if question.set == "longbench"] == rows
    assert [row for question, row in asked if question.set != "longbench"] == [row for row in rows if row < 3]


def test_every_way_answers(monkeypatch: pytest.MonkeyPatch, smollm2: Path) -> None:
    monkeypatch.setattr(frontier, "LARGE", "smollm2-135m")
    free, choice, claim = load_sets(None, ["sample"])["sample"]
    asked = frontier.Asked()
    ways = asked.ways()
    try:
        for question in (free, choice, claim):
            read = ways["large"](question)
            assert ways["large, best 5"](question) is read  # there are no more
            drafted = ways["drafts"](question)
            assert drafted["text"] in [draft["text"] for draft in drafted["drafts"]]
            assert drafted["seconds"] > drafted["phases"]["verification"] > 0
            assert read["right"] == question.is_right(read["text"])
        assert {"f1", "words"} <= ways["small, best 2"](free).keys()
        weighed = ways["large, calibrated"](claim)
        assert weighed["text"] in claim.task.choices
        assert weighed["said"] == weighed["text"]
    finally:
        asked.models.close()
    assert not asked.answers(choice, "cascade", 0)
    assert asked.answers(free, "cascade", 4)
    assert asked.answers(free, "cascade, best 5", 4)
    assert [asked.answers(free, "cascade, doubted", row) for row in (0, 4, 10)] == [True, False, True]
    assert not asked.answers(free, "drafts by large", 0)
