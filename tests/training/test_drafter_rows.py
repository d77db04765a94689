"""Rows as they are read and written, and the rows that share something with what is evaluated on."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from specrag.errors import InputError, SpecragError
from specrag.methods.speculative_rag.task import Task
from specrag.training.drafter.rows import ROWS, parse_row, read_rows, row_json, without_evaluation
from specrag.training.exclusion import EvaluationRows
from specrag.training.files import LineFile

PASSAGE = {"title": "Bronze", "text": "Bronze consists mostly of copper, with about 12 percent of tin in it."}
FREE: dict[str, Any] = {
    "id": "a",
    "kind": "free-form",
    "question": "What is bronze made of?",
    "answer": "copper",
    "passages": [PASSAGE, {"title": "", "text": "Brass holds zinc."}],
    "rationale": "Bronze consists mostly of copper.",
    "source": "test, CC0",
}
CHOICE: dict[str, Any] = {
    **FREE,
    "id": "b",
    "kind": "multiple-choice",
    "options": {"A": "tin", "B": "copper"},
    "answer": "B",
}
CLAIM: dict[str, Any] = {
    **FREE,
    "id": "c",
    "kind": "claim-checking",
    "question": "Bronze is mostly zinc.",
    "labels": ["True", "False"],
    "answer": "False",
    "passages": [{**PASSAGE, "gold": True}],
}


def write(path: Path, *rows: Any) -> Path:
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("row", [FREE, CHOICE, CLAIM], ids=["free", "choice", "claim"])
def test_a_row_is_written_as_it_was_read(row: dict[str, Any]) -> None:
    assert json.loads(row_json(parse_row(json.dumps(row), "x:1"))) == row


def test_a_letter_is_an_answer_though_it_is_an_article() -> None:
    assert parse_row(json.dumps({**CHOICE, "answer": "A"}), "x:1").answer_text == "tin"


def test_rows_come_from_files_and_folders_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    write(folder / ROWS, CLAIM)
    rows = read_rows([write(tmp_path / "rows.jsonl.gz", FREE, CHOICE), folder])
    assert [row.identifier for row in rows] == ["a", "b", "c"]
    assert rows[0].task == Task("What is bronze made of?")
    assert [row.answer_text for row in rows] == ["copper", "copper", "False"]
    assert [len(row.evidence) for row in rows] == [1, 1, 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"passages": []}, "rows.jsonl:2: passages"),
        ({"passages": None}, "rows.jsonl:2: passages"),
        ({"passages": [{"title": "Bronze", "text": " "}]}, "rows.jsonl:2: passages"),
        ({"passages": ["Bronze"]}, "rows.jsonl:2: passages"),
        ({"answer": None}, "rows.jsonl:2: answer"),
        ({"answer": " the "}, "rows.jsonl:2: answer"),
        ({"question": ""}, "rows.jsonl:2: question"),
        ({"kind": "essay"}, "rows.jsonl:2: task"),
        ({"kind": "multiple-choice"}, "rows.jsonl:2: options"),
        ({"options": ["tin"]}, "rows.jsonl:2: options"),
        ({**CHOICE, "answer": "C"}, "rows.jsonl:2: answer: 'C' is not usable: take one of A, B"),
        ({**CLAIM, "answer": "Maybe"}, "take one of True, False"),
        ({"id": "b"}, "it stands at rows.jsonl:1 too"),
        ({"id": None}, "rows.jsonl:2: id"),
        ({"rationale": " "}, "rows.jsonl:2: rationale"),
    ],
)
def test_a_bad_row_is_told_with_its_place(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        read_rows([write(tmp_path / "rows.jsonl", CHOICE, {**FREE, **change})])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_without_rows_are_told(tmp_path: Path) -> None:
    for path in (write(tmp_path / "empty.jsonl"), tmp_path / "missing.jsonl"):
        with pytest.raises(InputError, match=path.name):
            read_rows([path])
    torn = tmp_path / "torn.jsonl"
    torn.write_text(json.dumps(FREE)[:-9], encoding="utf-8")
    with pytest.raises(InputError, match=r"torn\.jsonl:1"):
        read_rows([torn])


def test_a_torn_line_is_cut_off_and_a_damaged_one_told(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", FREE)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id": "b", "answ')
    lines = LineFile(path)
    assert lines.identifiers == {"a"}
    assert path.read_bytes() == whole
    lines.add([json.dumps(CHOICE)])
    assert LineFile(path).identifiers == {"a", "b"}
    path.write_bytes(b"nonsense\n" + whole)
    with pytest.raises(SpecragError, match="line 1 of"):
        LineFile(path)


# -- what is evaluated on ---------------------------------------------------------------------------------------


LONG = " ".join(f"word{number}" for number in range(40))
SHAPES: list[dict[str, Any]] = [
    {"question": "Q?", "answers": ["copper", "Cu"], "passages": [{"title": "t", "text": LONG}]},
    {"question": "Q?", "answer": "copper", "passage": {"title": "t", "text": LONG}},
    {"question": "Q?", "choices": {"A": "tin", "B": "copper"}, "answer": "B", "evidence": f"t // {LONG}"},
    {"turns": ["Q?"], "answers": ["copper"], "ctxs": [LONG]},
]


def free_row(question: str, answer: str, text: str) -> Any:
    values = {**FREE, "question": question, "answer": answer, "passages": [{"text": text}]}
    return parse_row(json.dumps(values), "x:1")


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_evaluation_are_left_out_whatever_the_file_is_like(
    tmp_path: Path, shape: dict[str, Any]
) -> None:
    path = write(tmp_path / "data.jsonl.gz", shape)
    words = LONG.split()
    rows = [
        free_row("the q!", "zinc", "Another text."),  # the question, in other writing
        free_row(
            "Other?", "Copper", f"Before it: {' '.join(words[5:25])}."
        ),  # the answer and a part of its passage
        free_row("Other?", "zinc", LONG),  # another answer
        free_row("Other?", "copper", "Another text."),  # another passage
        free_row("Other?", "copper", " ".join(words[5:17])),  # twelve words alike
    ]
    kept = without_evaluation(rows, [path])
    assert kept.rows == tuple(rows[2:])
    assert (kept.same_question, kept.same_passage, kept.excluded) == (1, 1, 2)


def test_any_claim_of_an_evaluated_passage_is_left_out(tmp_path: Path) -> None:
    path = write(
        tmp_path / "d.jsonl", {"claim": "C.", "evidences": [{"evidence": LONG, "label": "Supports"}]}
    )
    claim = {**CLAIM, "passages": [{"text": LONG}]}
    assert without_evaluation([parse_row(json.dumps(claim), "x:1")], [path]).same_passage == 1
    assert without_evaluation([free_row("Other?", "False", LONG)], [path]).excluded == 0


def test_a_file_without_questions_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--exclude.*no questions"):
        EvaluationRows([write(tmp_path / "texts.jsonl", {"title": "t", "text": "t"})])


@pytest.mark.parametrize(
    ("name", "question", "answer", "passage"),
    [
        ("retrievalqa_popqa_trivia_100x25", "question", "answers", "passages"),
        ("arc_challenge_evidence", "question", "answer", "evidence"),
        ("climate_fever_300", "claim", "claim_label", "evidences"),
    ],
)
def test_the_answers_benchs_files_are_understood(
    measuring_data: Path, name: str, question: str, answer: str, passage: str
) -> None:
    path = measuring_data / f"{name}.jsonl.gz"
    evaluation = EvaluationRows([path])
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    for row in rows[:20]:
        assert evaluation.asks(row[question])
        found = row[passage]
        text = found if isinstance(found, str) else found[-1].get("text") or found[-1]["evidence"]
        said = row[answer][0] if isinstance(row[answer], list) else row.get("choices", {}).get(row[answer])
        assert evaluation.answers(said, [text])
        assert not evaluation.answers("zzz", [text])
    assert not evaluation.asks("Who carved the great heron of Bergville 7?")
