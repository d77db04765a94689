"""``specrag bench retrieval`` on a small real corpus: figures that can be counted by hand, resuming, pictures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.retrieval.building import building_trial
from benchmarks.retrieval.data import load_questions, part_of_corpus, spread
from benchmarks.retrieval.encoders import hit_shares
from benchmarks.retrieval.suite import RetrievalSuite, Size
from specrag.bench.measurement import Measurement, from_json_lines
from specrag.bench.registry import SuiteRegistry
from specrag.cli.bench import bench_command
from specrag.errors import InputError, SpecragError
from specrag.models import catalog
from specrag.retrieval.knowledge_base import INDEXES, KnowledgeBase

SUMMARIES = Path(__file__).parents[1] / "data" / "wikipedia-summaries" / "summaries.jsonl"
SIZE = Size(passages=20, questions=8, encoded=16, rows=1)


def run(data: Path | None, out: Path, *words: str) -> None:
    app = typer.Typer()
    app.command("bench")(bench_command(SuiteRegistry({"retrieval": lambda: RetrievalSuite(SIZE)})))
    given = [] if data is None else ["--data", str(data)]
    with pytest.MonkeyPatch.context() as patch:
        # Whoever edits the package meanwhile makes another version of it, whose records are not found.
        patch.setattr("specrag.bench.runner.code_version", lambda: "1")
        result = CliRunner().invoke(app, ["retrieval", "--quick", "--out", str(out), *given, *words])
    if result.exception is not None:
        raise result.exception


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, model_home: Path) -> Path:
    """The committed summaries as corpus, their descriptions as questions in two of the sets."""
    catalog.resolve("minilm-l6-v2")
    folder = tmp_path_factory.mktemp("data")
    rows = [json.loads(line) for line in SUMMARIES.read_text(encoding="utf-8").splitlines()]
    corpus = [
        {"id": number, "title": row["title"], "text": row["text"]} for number, row in enumerate(rows, 100)
    ]
    questions = [
        {"question": f"{row['title']}: {row['description']}", "positive_ids": [number]}
        for number, row in enumerate(rows, 100)
    ]
    write(folder / "corpus_wiki_passages.jsonl", corpus)
    write(folder / "corpus_questions_nq_dev.jsonl", questions[::2])
    write(folder / "corpus_questions_popqa_dev.jsonl", questions[1::2])
    return folder


def write(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def out(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    run(data, folder)
    return folder


@pytest.fixture(scope="module")
def measurements(out: Path) -> list[Measurement]:
    return from_json_lines((out / "retrieval.jsonl").read_text(encoding="utf-8"))


def figures(measurements: list[Measurement], task: str, method: str) -> Measurement:
    found = [entry for entry in measurements if (entry.task, entry.method) == (task, method)]
    assert found, f"no {method} in {task}"
    return found[-1]


def test_nothing_failed(out: Path, measurements: list[Measurement]) -> None:
    page = (out / "retrieval.md").read_text(encoding="utf-8")
    assert "## Failures" not in page
    assert {entry.task.split("/")[0] for entry in measurements} == {
        "building",
        "opening",
        "search",
        "hit rate",
        "encoders",
    }
    for name in ("retrieval-hits.png", "retrieval-search.png"):
        assert f"![{name}]({name})" in page
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_building_is_measured(measurements: list[Measurement]) -> None:
    built = figures(measurements, "building/corpus", "standard-rag").extra
    assert int(str(built["passages"]).split(".")[0]) >= 20
    assert float(str(built["peak_mib"])) > 100  # torch alone takes more
    assert float(str(built["disk_mib"])) > 0


@pytest.mark.parametrize("index", INDEXES)
def test_hit_rates_are_those_of_the_knowledge_base(
    index: str, data: Path, out: Path, measurements: list[Measurement]
) -> None:
    sets = load_questions(data, most=SIZE.questions)
    with KnowledgeBase.open(out / ".records" / "knowledge-base-20") as base:
        for entry in sets:
            right = 0
            for question in entry.questions:
                (hits,) = base.search([question.text], 1, index=index)
                right += str(hits[0].passage.metadata["id"]) in question.positives
            found = figures(measurements, f"hit rate/{entry.name}", f"standard-rag+{index}")
            assert found.n == len(entry.questions) == 8
            assert found.extra["top_1"] == right / 8
    overall = figures(measurements, "hit rate/overall", f"standard-rag+{index}")
    assert overall.n == 16
    shares = [float(str(overall.extra[name])) for name in ("top_1", "top_5", "top_20")]
    assert shares == sorted(shares)
    assert shares[0] > 0.8, "a title finds its article"


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_searches_are_timed_for_every_index(batch: int, measurements: list[Measurement]) -> None:
    for index in INDEXES:
        entry = figures(measurements, f"search/questions {batch}", f"standard-rag+{index}")
        assert 0 < float(str(entry.extra["index_ms"])) < 10_000
        figures(measurements, "opening/warm", f"standard-rag+{index}")


def test_the_encoders_are_compared_with_fp32(measurements: list[Measurement]) -> None:
    exact = figures(measurements, "encoders/passages", "standard-rag+fp32")
    assert exact.dtype == "fp32"
    assert exact.extra["same_best"] == 1
    assert float(str(exact.extra["largest_cosine_error"])) < 1e-5
    for method, error in (
        ("transformers+bf16", 1e-3),
        ("standard-rag+bf16", 1e-3),
        ("standard-rag+int8", 1e-2),
    ):
        entry = figures(measurements, "encoders/passages", method)
        assert entry.dtype == method.split("+")[1]
        assert 1e-7 < float(str(entry.extra["largest_cosine_error"])) < error
        assert float(str(entry.extra["top_5"])) > 0.8


def test_a_second_run_uses_the_records_and_the_knowledge_base(data: Path, out: Path, tmp_path: Path) -> None:
    again = shutil.copytree(out, tmp_path / "again")
    manifest = again / ".records" / "knowledge-base-20" / "manifest.json"
    written = manifest.stat().st_ino
    run(data, again, "--no-plots")
    assert (again / "retrieval.jsonl").read_bytes() == (out / "retrieval.jsonl").read_bytes()
    assert manifest.stat().st_ino == written


def test_without_data_it_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECRAG_DATA", raising=False)
    with pytest.raises(InputError, match="corpus_wiki_passages"):
        run(None, tmp_path, "--no-plots")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="corpus_questions"):
        run(tmp_path / "empty", tmp_path, "--no-plots")


def test_a_question_without_positives_is_named(tmp_path: Path) -> None:
    write(tmp_path / "corpus_questions_webq_dev.jsonl", [{"question": "what?", "positive_ids": []}])
    with pytest.raises(InputError, match="positive_ids"):
        load_questions(tmp_path)


def test_a_build_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(SpecragError, match=r"building failed: .*no-such"):
        building_trial(tmp_path / "no-such.jsonl", tmp_path / "kb")()


def test_a_part_of_the_corpus_holds_every_answer(data: Path) -> None:
    sets = load_questions(data, most=4)
    wanted = {
        identifier for entry in sets for question in entry.questions for identifier in question.positives
    }
    part = part_of_corpus(data, sets, 15)
    identifiers = [passage.identifier for passage in part]
    assert len(part) == 15
    assert wanted <= set(identifiers)
    assert identifiers == sorted(identifiers, key=int)


def test_spread_takes_even_distances() -> None:
    assert spread(range(10), 5) == [0, 2, 4, 6, 8]
    assert spread(range(3), 5) == spread(range(3), None) == [0, 1, 2]


def test_hit_shares_count_places_from_zero() -> None:
    assert hit_shares(np.array([0, 1, 4, 5, 19, 20])) == {"top_1": 1 / 6, "top_5": 0.5, "top_20": 5 / 6}


def test_the_real_question_sets_read(measuring_data: Path) -> None:
    sets = load_questions(measuring_data)
    assert {entry.name: len(entry.questions) for entry in sets} == {
        "nq": 500,
        "webq": 447,
        "triviaqa": 422,
        "popqa": 477,
    }
