"""``specrag bench passages``: a short run with the real model, its ceilings, retrievers, pictures and data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.passages import retrievers as stores
from benchmarks.passages.data import Source, sample_passages
from benchmarks.passages.figures import Figures, match_rate
from benchmarks.passages.pictures import TIMELINE_FILE, overlaps
from benchmarks.passages.subjects import (
    BASELINES,
    COMBINATIONS,
    COST_AWARE,
    PSA,
    RALMSPEC,
    REUSE,
    VARIANTS,
)
from benchmarks.passages.suite import FULL, LARGER_MODEL, QUICK, PassagesSuite
from specrag.bench.measurement import Measurement, check_method, from_json_lines
from specrag.bench.records import Outcome, Record, RecordKey
from specrag.bench.registry import SuiteRegistry
from specrag.bench.stride_process import best_stride
from specrag.bench.summary import summarise
from specrag.cli.bench import bench_command
from specrag.errors import InputError
from specrag.methods.retriever import PassageRetriever
from specrag.models import catalog
from specrag.retrieval.knowledge_base import KnowledgeBase
from tests.sample import build_sample

# Of QUICK: its 16 tokens (four strides) are the fewest in which a search and the model run at once.
SIZE = replace(QUICK, exact_new=4, retrievers=(stores.EXACT,), part_methods=(*BASELINES, "ralmspec+A"))


def bench(out: Path, *words: str) -> list[Measurement]:
    app = typer.Typer()
    app.command("bench")(bench_command(SuiteRegistry({"passages": lambda: PassagesSuite(SIZE)})))
    with pytest.MonkeyPatch.context() as patch:
        # Whoever edits the package meanwhile makes another version of it, whose records are not found.
        patch.setattr("specrag.bench.runner.code_version", lambda: "1")
        result = CliRunner().invoke(app, ["passages", "--quick", "--out", str(out), *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return from_json_lines((out / "passages.jsonl").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    catalog.resolve("minilm-l6-v2")
    folder = tmp_path_factory.mktemp("out")
    bench(folder)
    return folder


@pytest.fixture(scope="module")
def measured(out: Path) -> list[Measurement]:
    return from_json_lines((out / "passages.jsonl").read_text(encoding="utf-8"))


def section(measured: Sequence[Measurement], name: str) -> list[Measurement]:
    return [entry for entry in measured if entry.task.startswith(f"{name}/")]


# -- a short run --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_section_is_measured_and_nothing_fails(out: Path, measured: list[Measurement]) -> None:
    assert "## Failures" not in (out / "passages.md").read_text(encoding="utf-8")
    assert {entry.task.partition("/")[0] for entry in measured} == {
        stores.EXACT, "components", "batch", "delayed store", "accuracy of guesses", "corpus size", "threads",
        "timeline",
        "exactness",
    }  # fmt: skip


@pytest.mark.slow
def test_a_ratio_stands_beside_its_parts_and_its_ceiling(measured: list[Measurement]) -> None:
    found = {(entry.method, entry.baseline): entry for entry in section(measured, stores.EXACT)}
    for baseline in BASELINES:
        for method in (RALMSPEC, PSA, COST_AWARE):
            entry = found[method, baseline]
            assert entry.speedup is not None
            assert float(str(entry.extra["best_stride_speedup"])) > 0
            assert 0 <= float(str(entry.extra["match_rate"])) <= 1
            # In bf16 a near-tie may fall otherwise; the exactness section below must show 1.
            assert entry.identical in (0.0, 1.0)
    plain = found[REUSE, "sequential"].extra
    spent = float(str(plain["retrieval_ms"])) + float(str(plain["generation_ms"]))
    assert found[PSA, REUSE].ceiling == pytest.approx(spent / float(str(plain["generation_ms"])))
    assert found[PSA, "sequential"].ceiling is None, "which reads its prompts anew"
    assert 0.5 * float(str(plain["milliseconds"])) < spent <= float(str(plain["milliseconds"]))


@pytest.mark.slow
def test_only_the_slowed_store_is_simulated_and_as_slow_as_said(measured: list[Measurement]) -> None:
    for entry in measured:
        assert entry.simulated == entry.task.startswith(
            ("delayed store/", "accuracy of guesses/", "timeline/delayed")
        ), entry.task
    for entry in section(measured, "delayed store"):
        searched = str(entry.extra["search_by_queries"]).split(": ")[1].removesuffix(" ms").split(" ")[0]
        assert float(searched) >= 0.99 * float(str(entry.extra["delay_ms"]))


@pytest.mark.slow
def test_every_combination_is_exact(measured: list[Measurement]) -> None:
    found = section(measured, "exactness")
    assert {entry.method for entry in found} == {REUSE, *COMBINATIONS, COST_AWARE}
    assert {entry.task.rpartition(", ")[2] for entry in found} == {"greedy", "temperature 0.8"}
    for entry in found:
        assert entry.identical == 1.0, entry
        assert (entry.dtype, entry.n) == ("int8", 1)
        assert entry.extra["failed_batches"] == 0


@pytest.mark.slow
def test_the_pictures_are_there_and_a_search_overlaps_with_decoding(out: Path) -> None:
    for name in ("split-1", "delay", "size", "batch", "timeline-1"):
        assert (out / f"passages-{name}.png").stat().st_size > 5000
    (spans,) = json.loads((out / TIMELINE_FILE).read_text(encoding="utf-8")).values()
    assert overlaps(spans)


@pytest.mark.slow
def test_a_finished_run_measures_nothing_again(out: Path, measured: list[Measurement]) -> None:
    records = out / ".records" / "passages.jsonl"
    before = records.read_bytes()
    assert bench(out, "--no-plots") == measured
    assert records.read_bytes() == before


# -- its parts ----------------------------------------------------------------------------------------------


def test_every_method_has_a_name_that_may_be_published() -> None:
    for size in (FULL, LARGER_MODEL, QUICK):
        for label in size.part_methods:
            check_method(label)
            assert label in BASELINES or label in VARIANTS
    assert len(COMBINATIONS) == len({*COMBINATIONS.values()}) == 8


def record(method: str, seconds: float, repeat: int = 0, **figures: float) -> Record:
    outcome = Outcome(tokens=40, seconds=seconds, figures={"step_ms": 100.0, "chunks": 10.0, **figures})
    return Record(
        suite="passages",
        version="1",
        setting="here",
        key=RecordKey(task="t", row="r", method=method, repeat=repeat),
        outcome=outcome,
    )


def test_the_best_stride_and_the_ceiling_at_the_measured_costs() -> None:
    records = [
        record(REUSE, 3.0, search_1_ms=200.0, retrieval_ms=2000.0, generation_ms=1000.0),
        record(REUSE, 3.2, 1, search_1_ms=200.0, retrieval_ms=2000.0, generation_ms=1200.0),
        record(RALMSPEC, 1.5, looked_up=20.0, matched=16.0, search_3_ms=220.0),
        record(RALMSPEC, 1.6, 1, looked_up=20.0, matched=16.0, search_1_ms=200.0, search_3_ms=220.0),
    ]
    figures = Figures(records)
    assert match_rate([entry.outcome for entry in records if entry.outcome is not None]) == 0.8
    expected = best_stride(0.1, lambda queries: 0.19 + 0.01 * queries, 0.8, False, 10)
    assert figures.best("t", RALMSPEC) == expected
    (summary,) = [
        entry
        for entry in summarise(records, baselines=[REUSE])
        if (entry.method, entry.baseline) == (RALMSPEC, REUSE)
    ]
    extra = figures.of(summary)
    assert extra["best_stride_speedup"] == pytest.approx(expected.passages_per_second * 0.31)
    assert extra["ceiling"] == pytest.approx(1 + 4000 / 2200)
    assert extra["speedup_mean"] == pytest.approx(2.0)
    assert extra["speedup_deviation"] == pytest.approx(0.0)


def test_overlaps_are_those_of_searches_with_the_model() -> None:
    spans = [("search", 0.0, 1.0, True), ("decode", 0.5, 2.0, True), ("encode", 0.0, 9.0, True)]
    assert overlaps(spans) == [(0.5, 1.0)]
    assert not overlaps(spans[::2])


# -- retrievers ---------------------------------------------------------------------------------------------


class Context:
    """What a source needs of a run."""

    def __init__(self, out: Path, data: Path | None = None, *, quick: bool = True) -> None:
        self.out = out
        self.data = data
        self.quick = quick


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, model_home: Path) -> Iterator[KnowledgeBase]:
    catalog.resolve("minilm-l6-v2")
    with KnowledgeBase.open(build_sample(tmp_path_factory.mktemp("kb") / "kb")) as opened:
        yield opened


@pytest.fixture
def retrievers(base: KnowledgeBase, tmp_path: Path) -> Iterator[stores.Retrievers]:
    (tmp_path / ".records").mkdir()
    source = Source(Context(tmp_path))  # type: ignore[arg-type]
    source._opened = base
    found = stores.Retrievers(Context(tmp_path), source)  # type: ignore[arg-type]
    yield found
    found.close()


def test_distractors_never_come_first(retrievers: stores.Retrievers, base: KnowledgeBase) -> None:
    exact, larger = retrievers.get(stores.EXACT), retrievers.get(stores.enlarged(5000))
    assert (len(exact), len(larger)) == (len(base), 5000)
    queries = exact.encode(["Who invented the telephone?", "a metal", "deserts in Asia"])
    for mine, theirs in zip(exact.search(queries, 3), larger.search(queries, 3), strict=True):
        assert mine.ids[0] == base.ids[theirs.ids[0]]
        assert mine.scores[0] == theirs.scores[0]
    first, synthetic = larger.passages([0, 4999])
    assert first == replace(base.passage(int(base.ids[0])), id=0)
    assert (synthetic.id, synthetic.source) == (4999, stores.SYNTHETIC)
    lengths = np.linalg.norm(np.load(next(retrievers._work.glob("vectors-*.npy"))), axis=1)
    assert lengths == pytest.approx(1.0, abs=1e-5)


def test_a_cut_index_holds_the_first_passages(retrievers: stores.Retrievers) -> None:
    smaller = retrievers.get(stores.sized(10))
    (ranking,) = smaller.search(smaller.encode(["a river"]), 24)
    assert sorted(ranking.ids) == list(range(10))


def test_a_slowed_store_answers_the_same_later(
    retrievers: stores.Retrievers, base: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("benchmarks.passages.retrievers.time.sleep", slept.append)
    plain: PassageRetriever = retrievers.get(stores.SPARSE)
    slowed: PassageRetriever = stores.Slowed(plain, 0.25)
    queries = slowed.encode(["a river", "a desert"])
    for mine, theirs in zip(slowed.search(queries, 3), plain.search(queries, 3), strict=True):
        assert mine.ids.tolist() == theirs.ids.tolist()
    assert slept == [0.25]
    slowed.score(queries, base.ids[:1])
    slowed.passages(base.ids[:1].tolist())
    assert slept == [0.25]


def test_a_spoiled_cache_guesses_wrong_and_searches_find_the_same(
    retrievers: stores.Retrievers, base: KnowledgeBase
) -> None:
    plain: PassageRetriever = retrievers.get(stores.EXACT)
    spoiled = stores.Spoiled(plain, 0.5)
    queries, ids = plain.encode(["a river"]), base.ids[:10]
    truth = int(plain.score(queries, ids)[0].argmax())
    wrong = [int(spoiled.score(queries, ids)[0].argmax()) != truth for _ in range(200)]
    assert 70 < sum(wrong) < 130
    assert spoiled.search(queries, 3)[0].ids.tolist() == plain.search(queries, 3)[0].ids.tolist()


def test_the_database_gives_what_the_index_gives(retrievers: stores.Retrievers) -> None:
    pytest.importorskip("pgserver")
    exact, remote = retrievers.get(stores.EXACT), retrievers.get(stores.REMOTE)
    queries = exact.encode(["Who invented the telephone?", "deserts in Asia"])
    for mine, theirs in zip(exact.search(queries, 5), remote.search(queries, 5), strict=True):
        assert mine.scores.tolist() == theirs.scores.tolist()
        held = exact.passages(mine.ids.tolist()), remote.passages(theirs.ids.tolist())
        assert [passage.text for passage in held[0]] == [passage.text for passage in held[1]]


def test_an_unknown_retriever_is_named(retrievers: stores.Retrievers) -> None:
    with pytest.raises(InputError, match="retriever"):
        retrievers.get("exact")


# -- data ---------------------------------------------------------------------------------------------------


def test_the_sample_needs_no_data(tmp_path: Path) -> None:
    asked = Source(Context(tmp_path)).questions(2)  # type: ignore[arg-type]
    assert [question.task for question in asked] == ["sample", "sample"]
    assert len(sample_passages()) > 10


def test_questions_of_all_sets_take_turns(measuring_data: Path, tmp_path: Path) -> None:
    asked = Source(Context(tmp_path, measuring_data, quick=False)).questions(25)  # type: ignore[arg-type]
    assert [question.task for question in asked[:5]] == ["nq", "webq", "triviaqa", "wikiqa", "nq"]
    assert len({(question.task, question.name) for question in asked}) == 100


def test_data_without_questions_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="corpus_questions"):
        Source(Context(tmp_path, tmp_path)).questions(1)  # type: ignore[arg-type]


def test_a_row_without_a_question_is_named(tmp_path: Path) -> None:
    (tmp_path / "wikiqa_test.jsonl").write_text('{"question": "why?"}\n{"sentences": []}\n', encoding="utf-8")
    rows = [{"question": "who?", "positive_ids": ["1"]}]
    (tmp_path / "corpus_questions_nq_dev.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8"
    )
    with pytest.raises(InputError, match=r"wikiqa_test\.jsonl:2"):
        Source(Context(tmp_path, tmp_path)).questions(1)  # type: ignore[arg-type]
