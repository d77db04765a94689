"""Rows made of passages: what they hold, and runs that end at any moment."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

from recipes.passages import FilePassages
from recipes.question_prompts import (
    QuestionAnswer,
    Rejected,
    answer_kind,
    contains_phrase,
    read_question,
    read_statement,
    replace_answer,
)
from recipes.questions import QuestionSettings, make_questions
from recipes.rows import CARD, REJECTED, Status
from specrag.errors import EndpointUnavailable, InputError, SpecragError
from specrag.language_model import LanguageModel
from specrag.methods.generator import LocalGenerator
from specrag.methods.speculative_rag.task import CLAIM_LABELS
from specrag.models.endpoint import open_endpoint
from specrag.models.roles import TextRequest
from specrag.retrieval.passage import Passage
from specrag.training.drafter.rows import ROWS, read_rows
from specrag.training.exclusion import EvaluationRows
from tests.models.endpoint_server import MODEL, FakeServer, served
from tests.recipes.rule_writer import RuleBackend, RuleWriter, asks_for_carver, last, write_passages

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = QuestionSettings(rows=30, passages=4, choices=0.3, claims=0.4, batch=6)
POND = Passage(
    0,
    "x",
    "Orrin Pond",
    "",
    "Orrin Pond was dug in 1934 by Peter Aldana. It supplies the town of Wexby, and The Salt Road ends there.",
    {},
)


@pytest.fixture
def pool(tmp_path: Path) -> FilePassages:
    return FilePassages([write_passages(tmp_path)])


# -- what is written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (" Who dug Orrin Pond?\nAnswer: Peter Aldana.\nMore", QuestionAnswer("Who dug Orrin Pond?", "Peter Aldana")),
        (" Who dug Orrin Pond\nAnswer: Peter Aldana", QuestionAnswer("Who dug Orrin Pond?", "Peter Aldana")),
        (" Where does The Salt Road end?\nAnswer: Wexby", QuestionAnswer("Where does The Salt Road end?", "Wexby")),
        (" Who dug Orrin Pond?", "not in the form of question and answer"),
        ("\nAnswer: Wexby", "not in the form of question and answer"),
        (" Orrin Pond is old?\nAnswer: 1934", "no question"),
        (" What is Orrin Pond?\nAnswer: the town of Wexby", "the question asks who or what it is and no more"),
        (" Where is Orrin Pond?\nAnswer: Berlin", "the answer does not stand in the passage"),
        (" Who dug Orrin Pond?\nAnswer: Aldan", "the answer does not stand in the passage"),
        (" What does it say of Orrin Pond?\nAnswer: It supplies the town of Wexby and", "the answer is not short"),
        (" Was it Aldana who dug Orrin Pond?\nAnswer: Peter Aldana", None),
        (" When did Peter Aldana dig Orrin Pond?\nAnswer: Peter Aldana", "the question holds the answer"),
        (" Who dug Orrin Pond in the passage?\nAnswer: Peter Aldana", "the question points back to the passage"),
        (" Where was she when it was dug?\nAnswer: Wexby", "the question names nothing"),
    ],
)  # fmt: skip
def test_only_questions_that_stand_for_themselves_are_read(
    text: str, found: QuestionAnswer | str | None
) -> None:
    read = read_question(POND, text, 6)
    if isinstance(found, str):
        assert read == Rejected(found)
    elif found is not None:
        assert read == found
    else:
        assert isinstance(read, QuestionAnswer)


def test_statements_hold_the_answer_once_and_all_names() -> None:
    made = QuestionAnswer("Who dug Orrin Pond?", "Peter Aldana")
    assert read_statement(made, " Peter Aldana dug Orrin Pond.\n") == "Peter Aldana dug Orrin Pond."
    for text in ("Orrin Pond was dug.", "Peter Aldana, Peter Aldana dug Orrin Pond.", "Peter Aldana dug it in.",
                 "Did Peter Aldana dig Orrin Pond?"):  # fmt: skip
        assert isinstance(read_statement(made, text), Rejected), text
    assert (
        replace_answer("Peter Aldana dug Orrin Pond.", "Peter Aldana", "the town")
        == "The town dug Orrin Pond."
    )


def test_answers_of_one_kind_are_alike() -> None:
    kinds = [
        answer_kind(*pair)
        for pair in (
            ("Who dug Orrin Pond?", "Peter Aldana"),
            ("Who made the film?", "Ines Kroll"),
            ("When was Orrin Pond dug?", "1934"),
            ("When was Orrin Pond dug?", "3 May 1934"),
            ("What was her occupation?", "botanist"),
            ("How many are there?", "310"),
        )
    ]
    assert kinds[0] == kinds[1]
    assert len(set(kinds)) == 5


# -- rows ---------------------------------------------------------------------------------------------------------


def test_rows_hold_their_evidence_and_nothing_else_that_answers(pool: FilePassages, tmp_path: Path) -> None:
    run = make_questions(RuleWriter(asks_for_carver), pool, tmp_path / "out", SETTINGS)
    rows = read_rows([tmp_path / "out"])
    assert len(rows) == len(run.rows) == 30
    kinds = {kind: [row for row in rows if row.task.kind == kind] for kind in run.card["kinds"]}
    assert len(kinds) == 3
    for row in rows:
        assert len(row.passages) <= 4
        gold = [passage for passage in row.passages if passage.metadata]
        title = re.sub(r"^Who carved the |^The | was carved by.*|\?$", "", row.task.text)
        (carved,) = [p for p in map(pool.passage, range(len(pool))) if p.title == title]
        carver = re.findall(r"carved by (\w+ \w+)", carved.text)[0]
        others = [passage for passage in row.passages if passage not in gold]
        assert not any(contains_phrase(passage.text, carver) for passage in others)
        if row.answer == CLAIM_LABELS[2]:
            assert not gold
        else:
            assert [passage.text for passage in gold] == [carved.text]
    for row in kinds["multiple-choice"]:
        assert list(row.task.options) == ["A", "B", "C", "D"]
        assert len(set(row.task.options.values())) == 4
        assert contains_phrase(row.evidence[0].text, row.answer_text)
        assert sum(contains_phrase(row.evidence[0].text, text) for text in row.task.options.values()) == 1
    for row in kinds["claim-checking"]:
        if row.evidence:
            said = re.findall(r"carved by (\w+ \w+)", row.task.text)[0]
            assert (row.answer == row.task.labels[0]) == contains_phrase(row.evidence[0].text, said)
    assert {row.answer for row in kinds["claim-checking"]} >= {"True", "False"}


def test_what_cannot_be_used_is_turned_down_with_its_reason(pool: FilePassages, tmp_path: Path) -> None:
    def rule(request: TextRequest) -> str:
        number = int(re.findall(r"ville (\d+)", last(request))[0])
        if number % 4 == 0:
            return " Who carved the Great thing of the town?\nAnswer: nobody"
        if number % 4 == 1:
            return " Who carved the Great thing?\nAnswer: sea"  # finds any of them
        return asks_for_carver(request)

    settings = replace(SETTINGS, rows=100, choices=0, claims=0)
    run = make_questions(RuleWriter(rule), pool, tmp_path / "out", settings)
    lines = [json.loads(line) for line in (tmp_path / "out" / REJECTED).read_text().splitlines()]
    assert {line["id"] for line in lines}.isdisjoint(row.identifier for row in run.rows)
    assert len(lines) + len(run.rows) == len(pool)
    card = json.loads((tmp_path / "out" / CARD).read_text())
    assert card["reasons"]["the answer does not stand in the passage"] == 10
    assert card["reasons"]["the question was asked before"] >= 1
    assert card["rejection_rate"] == pytest.approx(len(lines) / len(pool), abs=1e-4)
    assert card["settings"]["writer"] == "rule"


def test_rows_of_evaluation_are_never_written(pool: FilePassages, tmp_path: Path) -> None:
    settings = replace(SETTINGS, choices=0, claims=0)
    whole = make_questions(RuleWriter(asks_for_carver), pool, tmp_path / "whole", settings)
    asked, paired = whole.rows[0], whole.rows[1]
    evaluated = [
        {"question": asked.task.text.upper(), "answers": ["x"]},
        {"question": "Q?", "answers": [paired.answer], "passages": [{"text": paired.evidence[0].text}]},
    ]
    path = tmp_path / "evaluated.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in evaluated), encoding="utf-8")
    made = make_questions(
        RuleWriter(asks_for_carver), pool, tmp_path / "out", settings, evaluation=EvaluationRows([path])
    )
    identifiers = {row.identifier for row in made.rows}
    assert not identifiers & {asked.identifier, paired.identifier}
    assert made.rejected == {"it is in what is evaluated on": 2}


def test_a_model_makes_rows(llm: LanguageModel, pool: FilePassages, tmp_path: Path) -> None:
    settings = QuestionSettings(rows=2, passages=3, choices=0, claims=0.5, batch=4)
    run = make_questions(LocalGenerator(llm), pool, tmp_path / "out", settings, command="specrag train ...")
    assert len(run.rows) == 2
    for row in run.rows:
        assert len(row.passages) >= 1
        if row.task.kind == "free-form":
            assert contains_phrase(row.evidence[0].text, row.answer)
    assert run.card["command"] == "specrag train ..."
    assert run.card["rows_per_hour"] > 0


# -- ends at any moment -------------------------------------------------------------------------------------------


def test_a_dead_writer_loses_a_batch_and_the_run_goes_on(pool: FilePassages, tmp_path: Path) -> None:
    whole = make_questions(RuleWriter(asks_for_carver), pool, tmp_path / "whole", SETTINGS)
    told: list[Status] = []
    with pytest.raises(EndpointUnavailable, match="it went away"):
        make_questions(
            RuleWriter(asks_for_carver, lives=20), pool, tmp_path / "out", SETTINGS, show=told.append
        )
    assert told[-1].done == len(read_rows([tmp_path / "out"])) >= 10
    seen = RuleWriter(asks_for_carver)
    make_questions(seen, pool, tmp_path / "out", SETTINGS)
    for name in (ROWS, REJECTED):
        paths = [tmp_path / folder / name for folder in ("whole", "out")]
        assert paths[0].exists() == paths[1].exists()
        assert not paths[0].exists() or paths[0].read_bytes() == paths[1].read_bytes()
    assert len(seen.requests) < len(whole.rows) * 1.5 - 10


def test_more_rows_are_added_to_those_that_are_there(pool: FilePassages, tmp_path: Path) -> None:
    make_questions(RuleWriter(asks_for_carver), pool, tmp_path / "out", replace(SETTINGS, rows=8))
    before = (tmp_path / "out" / ROWS).read_bytes()
    assert before.count(b"\n") == 8
    make_questions(RuleWriter(asks_for_carver), pool, tmp_path / "out", replace(SETTINGS, rows=20))
    after = (tmp_path / "out" / ROWS).read_bytes()
    assert after.startswith(before)
    assert after.count(b"\n") == 20
    with pytest.raises(InputError, match="seed 0 there, 1 here"):
        make_questions(RuleWriter(asks_for_carver), pool, tmp_path / "out", replace(SETTINGS, seed=1))


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The system refuses to make a file larger than this, as it does when the disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_what_was_written(pool: FilePassages, tmp_path: Path) -> None:
    make_questions(RuleWriter(asks_for_carver), pool, tmp_path / "whole", SETTINGS)
    make_questions(RuleWriter(asks_for_carver), pool, tmp_path / "out", replace(SETTINGS, rows=6))
    before = (tmp_path / "out" / ROWS).read_bytes()
    with (
        largest_file(len(before) + 700),
        pytest.raises(SpecragError, match="no space is left") as caught,
    ):
        make_questions(RuleWriter(asks_for_carver), pool, tmp_path / "out", SETTINGS)
    assert "intact" in str(caught.value)
    assert (tmp_path / "out" / ROWS).read_bytes().startswith(before)
    make_questions(RuleWriter(asks_for_carver), pool, tmp_path / "out", SETTINGS)
    assert (tmp_path / "out" / ROWS).read_bytes() == (tmp_path / "whole" / ROWS).read_bytes()


def start(address: str, passages: Path, out: Path) -> subprocess.Popen[str]:
    """A run of the command line in a process of its own."""
    words = [
        "--model",
        address,
        "--passages",
        passages,
        "--out",
        out,
        "--rows",
        30,
        "--batch",
        4,
        "--row-passages",
        3,
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "specrag", "train", "questions", "--json", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """The command line with an endpoint: killed between two batches or within one, it ends in the same rows."""
    passages = write_passages(tmp_path)
    with served(FakeServer(RuleBackend(0.05))) as server:
        address = f"{server.url}#{MODEL}"
        killed = start(address, passages, tmp_path / "killed")
        path = tmp_path / "killed" / ROWS
        while killed.poll() is None and not (path.exists() and path.read_bytes().count(b"\n") >= 4):
            time.sleep(0.002)
        killed.send_signal(signal.SIGKILL)
        _, error = killed.communicate(timeout=60)
        assert killed.returncode == -signal.SIGKILL, error
        assert 4 <= path.read_bytes().count(b"\n") < 30
        settings = QuestionSettings(rows=30, passages=3, batch=4)
        with open_endpoint(address) as writer:
            for folder in ("killed", "whole"):
                run = make_questions(writer, FilePassages([passages]), tmp_path / folder, settings)
                assert len(run.rows) == 30
    assert (tmp_path / "whole" / ROWS).read_bytes() == path.read_bytes()


# -- what is given ------------------------------------------------------------------------------------------------


def test_bad_settings_and_passages_are_told(tmp_path: Path) -> None:
    for name, value in (("rows", 0), ("passages", 0), ("choices", 1.5), ("claims", 0.9), ("seed", -1)):
        with pytest.raises(InputError, match=name):
            QuestionSettings(**{"choices": 0.2, name: value})  # type: ignore[arg-type]
    path = tmp_path / "passages.jsonl"
    path.write_text('{"title": "t", "text": "x"}\n{"title": "t"}\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"passages\.jsonl:2: text"):
        FilePassages([path])
    path.write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="no passages"):
        FilePassages([path])


def test_another_folder_is_not_overwritten(pool: FilePassages, tmp_path: Path) -> None:
    (tmp_path / ROWS).write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match="another origin"):
        make_questions(RuleWriter(asks_for_carver), pool, tmp_path, SETTINGS)
    assert (tmp_path / ROWS).read_text(encoding="utf-8") == "mine"
