"""``specrag bench answers``: its rows, its figures, and a short run with the real model."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specrag.bench.data import find_file
from specrag.bench.measurement import Measurement, from_json_lines
from specrag.bench.question_data import load_passage_questions
from specrag.bench.suites.answers_sample import SAMPLE
from specrag.cli.main import app
from specrag.errors import InputError
from specrag.evaluation.metrics import contains_answer

ROW = {
    "id": "popqa-0",
    "question": "What is tin?",
    "answers": ["a metal", "metal"],
    "passages": [{"title": "Tin", "text": "Tin is a metal."}, {"text": "Untitled."}],
    "has_answer": False,
}


def test_rows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(ROW) + "\n" + json.dumps({**ROW, "id": 7})).encode()))
    first, second = load_passage_questions(path)
    assert (first.identifier, second.identifier) == ("popqa-0", "7")
    assert first.answers == ("a metal", "metal")
    assert [passage.title for passage in first.passages] == ["Tin", ""]
    assert [passage.id for passage in first.passages] == [0, 1]
    assert not first.answerable


@pytest.mark.parametrize(
    "change",
    [
        {"question": 3},
        {"answers": []},
        {"answers": "metal"},
        {"answers": [3]},
        {"passages": []},
        {"passages": ["x"]},
        {"passages": [{"title": "x"}]},
    ],
)
def test_a_row_of_another_form_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n{json.dumps({**ROW, **change})}\n")
    with pytest.raises(InputError, match=r"rows\.jsonl:2"):
        load_passage_questions(path)


def test_the_sample_can_be_answered() -> None:
    for question in SAMPLE:
        assert any(contains_answer(passage.text, question.answers) for passage in question.passages)
    assert len({question.identifier for question in SAMPLE}) == len(SAMPLE)


def bench(out: Path, *words: str) -> list[Measurement]:
    command = ["bench", "answers", "--quick", "--no-plots", "--out", str(out), "--json", "-", *words]
    result = CliRunner().invoke(app, command)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return from_json_lines(result.stdout)


def test_a_quick_run_measures_and_resumes(smollm2: Path, tmp_path: Path) -> None:
    (measured,) = bench(tmp_path)
    assert (measured.suite, measured.task, measured.method) == ("answers", "sample", "standard-rag")
    assert (measured.model, measured.dtype, measured.n) == ("smollm2-135m", "bf16", len(SAMPLE))
    assert measured.baseline is None
    assert measured.accuracy is not None
    assert measured.accuracy >= 0.5
    assert measured.mat == 1.0
    assert measured.extra["cites"] == 1.0
    assert measured.extra["cites_no_source"] == 0.0
    records = tmp_path / ".records" / "answers.jsonl"
    before = records.read_bytes()
    assert bench(tmp_path) == [measured]
    assert records.read_bytes() == before
    outputs = [json.loads(line)["outcome"]["output"] for line in before.splitlines()]
    assert all(output.startswith("According to passage [") for output in outputs)
    assert "accuracy" in (tmp_path / "answers.md").read_text(encoding="utf-8")


def test_data_without_the_questions_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"popqa_dev_500x5\.jsonl"):
        bench(tmp_path / "out", "--data", str(tmp_path))


def test_the_real_rows_can_be_read(shared_data: Path) -> None:
    questions = load_passage_questions(find_file(shared_data, "popqa_dev_500x5.jsonl"))
    assert len(questions) == 500
    answerable = [question for question in questions if question.answerable]
    assert len(answerable) == 475
    for question in answerable[:100]:
        read = " ".join(passage.text for passage in question.passages)
        assert contains_answer(read, question.answers), question.identifier
