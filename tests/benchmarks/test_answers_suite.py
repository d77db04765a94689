"""``specrag bench answers``: its rows, its figures, and a short run with the real model."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.answers.data import ROWS, SIZES, Question, load_sets
from benchmarks.answers.drafts import SCORINGS
from benchmarks.answers.figures import (
    PLAIN,
    SPECULATIVE,
    STANDARD,
)
from benchmarks.answers.suite import ABLATIONS, REMEDIES, ROUNDS
from benchmarks.answers.trials import Pair
from benchmarks.questions import SAMPLE, load_passage_questions
from specrag.bench.measurement import Measurement, check_method, from_json_lines
from specrag.bench.metrics import contains_answer
from specrag.cli.main import app
from specrag.errors import InputError
from specrag.methods.speculative_rag.task import Task
from tests.processor import PACKED_BF16

ROW = {
    "id": "popqa-0",
    "question": "What is tin?",
    "answers": ["a metal", "metal"],
    "passages": [{"title": "Tin", "text": "Tin is a metal."}, {"text": "Untitled."}],
    "has_answer": False,
}
SMALL = "smollm2-135m"
PAIR = f"{SMALL} + {SMALL}"


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


def question(task: Task, *answers: str) -> Question:
    return Question(set="sample", identifier="1", task=task, answers=answers, passages=())


@pytest.mark.parametrize(
    ("asked", "text", "right"),
    [
        (question(Task("Who?"), "Marie Curie"), "It was Marie Curie [1].", True),
        (question(Task("Who?"), "Marie Curie"), "Nobody knows.", False),
        (question(Task("Is it?"), "no"), "No, it is not.", True),
        (question(Task("Is it?"), "no"), "It is not known.", False),
        (question(Task("?", "multiple-choice", {"A": "tin", "B": "zinc"}), "B"), "B. zinc", True),
        (question(Task("?", "multiple-choice", {"A": "tin", "B": "zinc"}), "B"), "A. tin", False),
        (question(Task("?", "claim-checking", labels=("True", "False")), "False"), "False.", True),
        (question(Task("?", "claim-checking", labels=("True", "False")), "False"), "Perhaps.", False),
    ],
)
def test_what_is_right(asked: Question, text: str, right: bool) -> None:
    assert asked.is_right(text) is right


def bench(out: Path, *words: str) -> list[Measurement]:
    command = ["bench", "answers", "--quick", "--out", str(out), "--json", "-", *words]
    with pytest.MonkeyPatch.context() as patch:
        # Whoever edits the package meanwhile makes another version of it, whose records are not found.
        patch.setattr("specrag.bench.runner.code_version", lambda: "1")
        patch.setattr("benchmarks.answers.suite.ROWS", 2)
        result = CliRunner().invoke(app, command)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return from_json_lines(result.stdout)


@PACKED_BF16
@pytest.mark.slow
def test_a_quick_run_measures_and_resumes(smollm2: Path, tmp_path: Path) -> None:
    measured = bench(tmp_path)
    found = {(entry.task, entry.model, entry.method): entry for entry in measured}
    assert {key[0] for key in found} == {"sample", "scores/sample", "remedies/sample"}
    tried = {method for task, _, method in found if task == "remedies/sample" and "oracle" not in method}
    assert tried == {SPECULATIVE, *(f"{SPECULATIVE}+{name}" for name in REMEDIES)}
    mine = {method for task, model, method in found if task == "sample" and model == PAIR}
    assert mine == {
        SPECULATIVE,
        f"{SPECULATIVE}+one-draft",
        f"{SPECULATIVE}+drafter-alone",
        f"{SPECULATIVE}+random-draft",
        f"{SPECULATIVE}+oracle",
        f"{STANDARD}+corrective",
        f"{STANDARD}+reflective",
    }
    standard = found["sample", SMALL, STANDARD]
    assert standard.extra["cites"] == 1.0
    assert standard.extra["cites_no_source"] == 0.0
    drafted = found["sample", PAIR, SPECULATIVE]
    assert (drafted.suite, drafted.dtype, drafted.n) == ("answers", "bf16", 2)
    assert drafted.baseline in {STANDARD, PLAIN}
    assert (drafted.extra["malformed"], drafted.extra["drafts"]) == (0.0, 2.0)
    assert 0 < float(drafted.extra["rationale_words"] or 0) < 100
    free = drafted.extra  # one of the two questions is in free form
    assert {free["right_with_rationale"], free["oracle_with_rationale"]} <= {0.0, 1.0}
    assert float(free["oracle_with_rationale"] or 0) >= float(free["right_with_rationale"] or 0)
    assert float(free["words_with_rationale"] or 0) > float(free["answer_words"] or 0)
    oracle = found["sample", PAIR, f"{SPECULATIVE}+oracle"]
    assert (oracle.accuracy or 0.0) >= (drafted.accuracy or 0.0)
    assert oracle.speedup is None
    chosen = found["scores/sample", PAIR, f"{SPECULATIVE}+product-all"]
    assert chosen.accuracy == drafted.accuracy  # the default, judged again from the record
    records = tmp_path / ".records" / "answers.jsonl"
    before = records.read_bytes()
    assert bench(tmp_path) == measured
    assert records.read_bytes() == before
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {"answers-lengths.png", "answers-accuracy.png", "answers-frontier.png"}


@PACKED_BF16
def test_models_in_eight_bits_have_records_of_their_own(smollm2: Path, tmp_path: Path) -> None:
    command = [
        "bench",
        "answers",
        "--quick",
        "--task",
        "sample",
        "--method",
        STANDARD,
        "--out",
        str(tmp_path),
    ]
    lines = tmp_path / "answers.jsonl"
    told = []
    for words in ([], ["--dtype", "int8"], []):
        result = CliRunner().invoke(app, [*command, *words, "--no-plots"])
        assert result.exit_code == 0, result.output
        told.append(from_json_lines(lines.read_text()))
    assert [[entry.dtype for entry in entries] for entries in told] == [["bf16"], ["int8"], ["bf16"]]
    assert "--dtype int8" in told[1][0].command
    times = [entries[0].extra["mean_ms"] for entries in told]
    assert times[0] == times[2] != times[1]


def test_data_without_the_questions_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"popqa_dev_500x5\.jsonl"):
        bench(tmp_path / "out", "--data", str(tmp_path))


def test_the_real_rows_can_be_read(measuring_data: Path, model_home: Path) -> None:
    names = [name for name in SIZES if name != "sample"]
    sets = load_sets(measuring_data, names)
    counts = {name: len(rows) for name, rows in sets.items()}
    assert counts == {name: 50 if name in ("popqa-25", "triviaqa") else ROWS for name in names}
    for name, rows in sets.items():
        assert len({row.identifier for row in rows}) == len(rows)
        for row in rows:
            assert 1 <= len(row.passages) <= SIZES[name].passages
            texts = [" ".join(passage.text.split()) for passage in row.passages]
            assert len(set(texts)) == len(texts)
            gold = row.answers[0]
            if row.task.kind == "multiple-choice":
                assert gold in row.task.options
            elif row.task.kind == "claim-checking":
                assert gold in row.task.labels
            assert row.is_right(gold)
    fewer = load_sets(measuring_data, names, 5)
    assert all(fewer[name] == rows[:5] for name, rows in sets.items())
    assert {row.group for row in sets["hotpotqa"]} == {"bridge", "comparison"}
    assert all(row.group == "" for row in sets["musique"])
    read = [" ".join(passage.text for passage in row.passages) for row in sets["popqa"]]
    assert all(contains_answer(text, row.answers) for text, row in zip(read, sets["popqa"], strict=True))


def test_questions_of_a_corpus_have_what_was_found_for_them(tmp_path: Path) -> None:
    passages = [{"id": number, "title": f"T{number}", "text": f"Text {number}."} for number in range(25)]
    rows = [{"id": "a", "question": "What is 3?", "answers": ["three"], "bm25_top20": [*range(24, 4, -1)]}]
    files: dict[str, list[Any]] = {"corpus_wiki_passages": passages}
    files |= {f"corpus_questions_{name}_dev": rows for name in ("nq", "webq", "triviaqa", "popqa")}
    for name, lines in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sets = load_sets(tmp_path, ["nq-corpus", "popqa-corpus"])
    assert [sets[name][0].set for name in sets] == ["nq-corpus", "popqa-corpus"]
    assert [passage.title for passage in sets["nq-corpus"][0].passages] == [f"T{n}" for n in range(24, 4, -1)]
    assert sets["nq-corpus"][0].is_right("It is three.")


def test_unranked_passages_are_ranked_before_the_last_are_left_out(model_home: Path, tmp_path: Path) -> None:
    others = [{"title": f"Town {n}", "text": f"Town {n} has {n} bridges and a market."} for n in range(19)]
    radium = {"title": "Radium", "text": "Marie Curie discovered radium in 1898."}
    row = {"question": "Who discovered radium?", "answers": ["Marie Curie"], "passages": [*others, radium]}
    for name in ("musique_dev_100x20.jsonl", "retrievalqa_popqa_trivia_100x25.jsonl"):
        (tmp_path / name).write_text(json.dumps({**row, "id": "triviaqa-1"}) + "\n")
    sets = load_sets(tmp_path, ["musique", "triviaqa"])
    ranked, retrieved = sets["musique"][0].passages, sets["triviaqa"][0].passages
    assert (len(ranked), len(retrieved)) == (15, 10)
    assert ranked[0].title == "Radium"
    assert [passage.title for passage in retrieved] == [f"Town {n}" for n in range(10)], (
        "the retriever's own order"
    )


def test_passages_hold_an_answer_or_not() -> None:
    free, choice, _ = load_sets(None, ["sample"])["sample"]
    holds = [free.is_in([number]) for number in range(1, len(free.passages) + 1)]
    assert {True, False} == set(holds)
    assert free.is_in(range(1, len(free.passages) + 1))
    assert choice.is_in([1]) is None
    assert replace(free, answers=("yes",)).is_in([1]) is None


def test_the_plan_is_sound() -> None:
    assert all(list(steps) == sorted(steps) for steps in zip(*ROUNDS, strict=True))
    assert ROUNDS[-1][0] == ROWS
    assert all(0 < ablated <= rows for rows, ablated in ROUNDS)
    for ablation in ABLATIONS:
        assert set(ablation.sets) <= SIZES.keys()
        for name in ablation.settings:
            check_method(f"{SPECULATIVE}+{name}")
    for name in SCORINGS:
        check_method(f"{SPECULATIVE}+{name}")


def test_an_adapter_that_changes_is_another_drafter(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    pair = Pair(drafter="d", verifier="v", adapter=tmp_path)
    labels = {pair.label}
    for name in ("adapter_config.json", "drafter.json"):
        (tmp_path / name).write_text("{}")
        labels.add(replace(pair).label)
    assert len(labels) == 3
    assert all(label.startswith(f"d ({tmp_path.name} ") for label in labels)
