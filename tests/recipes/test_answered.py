"""Rows from public questions: what they hold, what is left out, and that some hold no answer."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from recipes.answered import AnsweredSettings, make_answered_rows
from recipes.passages import FilePassages
from recipes.question_prompts import contains_phrase
from recipes.rows import CARD
from specrag.errors import InputError
from specrag.training.drafter.rows import GOLD, ROWS
from specrag.training.exclusion import EvaluationRows

TOWNS = ("Arlow", "Brenn", "Corvin", "Dalmar")


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def question(town: str, **values: Any) -> dict[str, Any]:
    text = f"{town} lies on a river. The mill of {town} was built by {town} Smith in 1888. It burnt down."
    asked = f"who built the mill of {town}"
    return {
        "id": town,
        "question": asked,
        "answers": ["nobody at all", f"{town} Smith"],
        "passage": {"title": town, "text": text},
    } | values


@pytest.fixture
def pool(tmp_path: Path) -> FilePassages:
    texts = [f"A mill of {town} stood near water, number {n}." for town in TOWNS for n in range(3)]
    lines = [{"title": "Mills", "text": text} for text in texts]
    lines += [{"title": town, "text": f"The mill of {town}: {town} Smith."} for town in TOWNS]
    return FilePassages([write(tmp_path / "pool.jsonl", lines)])


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    return write(tmp_path / "asked.jsonl", [question(town) for town in TOWNS])


def test_rows_hold_the_answer_or_do_not(pool: FilePassages, asked: Path, tmp_path: Path) -> None:
    settings = AnsweredSettings(rows=40, missing=0.4)
    rows = make_answered_rows(asked, pool, tmp_path / "out", settings).rows
    assert len(rows) == 40
    assert len({(row.task.text, tuple(each.text for each in row.passages)) for row in rows}) == 40
    places = Counter[int | None]()
    for row in rows:
        held = [contains_phrase(f"{each.title} {each.text}", row.answer) for each in row.passages]
        marked = [bool(each.metadata.get(GOLD)) for each in row.passages]
        assert held == marked
        assert len(row.evidence) == sum(marked) <= 1
        assert row.rationale == f"The mill of {row.answer.split()[0]} was built by {row.answer} in 1888."
        places[marked.index(True) if any(marked) else None] += 1
    assert 8 <= places[None] <= 24
    assert places[0] > places[1] > 0


def test_the_same_call_gives_the_same_rows(pool: FilePassages, asked: Path, tmp_path: Path) -> None:
    settings = AnsweredSettings(rows=12)
    make_answered_rows(asked, pool, tmp_path / "one", settings)
    first = (tmp_path / "one" / ROWS).read_bytes()
    make_answered_rows(asked, pool, tmp_path / "one", settings)
    make_answered_rows(asked, pool, tmp_path / "two", settings)
    assert [(tmp_path / name / ROWS).read_bytes() for name in ("one", "two")] == [first, first]
    make_answered_rows(asked, pool, tmp_path / "one", AnsweredSettings(rows=14))  # goes on, as after a kill
    assert (tmp_path / "one" / ROWS).read_bytes().startswith(first)
    assert len(make_answered_rows(asked, pool, tmp_path / "one", settings).rows) == 14
    with pytest.raises(InputError, match="take another --out"):
        make_answered_rows(asked, pool, tmp_path / "one", AnsweredSettings(rows=12, seed=1))


def test_what_is_evaluated_on_or_cannot_be_used_is_left_out(pool: FilePassages, tmp_path: Path) -> None:
    lines = [
        question("Arlow"),
        question("Brenn"),
        question("Corvin", answers=["nobody at all"]),
        question("Dalmar", passage={"title": "Dalmar", "text": "word " * 50 + "Dalmar Smith."}),
    ]
    excluded = write(
        tmp_path / "evaluated.jsonl", [{"question": "Who built the mill of Brenn?", "answer": "x"}]
    )
    asked = write(tmp_path / "asked.jsonl", lines)
    evaluation = EvaluationRows([excluded])
    run = make_answered_rows(asked, pool, tmp_path / "out", AnsweredSettings(rows=6), evaluation=evaluation)
    assert {row.answer for row in run.rows} == {"Arlow Smith"}
    card = json.loads((tmp_path / "out" / CARD).read_text(encoding="utf-8"))
    assert card["reasons"] == {
        "no sentence of a usual length holds an answer": 2,
        "it is in what is evaluated on": 1,
    }


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"answers": "Smith"}, r"asked\.jsonl:1: answers: 'Smith' .*give a list of texts"),
        ({"passage": "text"}, r"asked\.jsonl:1: passage: 'text' .*give an object of title and text"),
        ({"id": 7}, r"asked\.jsonl:1: .*give every question an id and a text"),
    ],
)
def test_a_line_that_is_no_question_is_named(
    pool: FilePassages, tmp_path: Path, values: dict[str, Any], named: str
) -> None:
    asked = write(tmp_path / "asked.jsonl", [question("Arlow", **values)])
    with pytest.raises(InputError, match=named):
        make_answered_rows(asked, pool, tmp_path / "out", AnsweredSettings(rows=1))


@pytest.mark.parametrize(("values", "named"), [({"rows": 0}, "rows"), ({"missing": 1.5}, "missing")])
def test_settings_are_checked(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        AnsweredSettings(**values)
