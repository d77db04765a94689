"""``specrag bench knnlm``: a short run with the real model, its ceilings, its datastores and its pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.knnlm.figures import Figures, search_ms
from benchmarks.knnlm.stores import TEST, SlowedKeys, Stores, enlarge, flat_keys
from benchmarks.knnlm.subjects import ASYNCHRONOUS, FIXED, SEQUENTIAL, UNCAPPED, VARIANTS
from benchmarks.knnlm.suite import FULL, QUICK, KnnLmSuite
from specrag.bench.measurement import Measurement, check_method, from_json_lines
from specrag.bench.records import Outcome, Record, RecordKey
from specrag.bench.registry import SuiteRegistry
from specrag.bench.stride_process import best_stride
from specrag.bench.summary import summarise
from specrag.cli.bench import bench_command
from specrag.methods.knn_lm.store.datastore import Datastore
from tests.methods.knn_store.knn_toys import build

SIZE = replace(
    QUICK,
    helping_tokens=60,
    exact_k=(1,),
    exact_new=6,
    fast=QUICK.fast[:1],
    fast_k=(8,),
    fast_new=8,
    fast_methods=(SEQUENTIAL, "knn-lm+stride=8", ASYNCHRONOUS),
    slowed=(2.0,),
)


def bench(out: Path, *words: str) -> list[Measurement]:
    app = typer.Typer()
    app.command("bench")(bench_command(SuiteRegistry({"knnlm": lambda: KnnLmSuite(SIZE)})))
    with pytest.MonkeyPatch.context() as patch:
        # Whoever edits the package meanwhile makes another version of it, whose records are not found.
        patch.setattr("specrag.bench.runner.code_version", lambda: "1")
        result = CliRunner().invoke(app, ["knnlm", "--quick", "--out", str(out), *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return from_json_lines((out / "knnlm.jsonl").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    folder = tmp_path_factory.mktemp("out")
    bench(folder)
    return folder


@pytest.fixture(scope="module")
def measured(out: Path) -> list[Measurement]:
    return from_json_lines((out / "knnlm.jsonl").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_every_section_is_measured_and_nothing_fails(out: Path, measured: list[Measurement]) -> None:
    assert "## Failures" not in (out / "knnlm.md").read_text(encoding="utf-8")
    assert {entry.task.partition("/")[0] for entry in measured} == {
        "perplexity", "speed", "slowed store", "exactness",
    }  # fmt: skip
    for name in ("k-1", "slowed", "perplexity"):
        assert (out / f"knnlm-{name}.png").stat().st_size > 5000


@pytest.mark.slow
def test_every_text_is_the_baselines(measured: list[Measurement]) -> None:
    compared = [entry for entry in measured if entry.baseline == SEQUENTIAL]
    assert {entry.task.partition("/")[0] for entry in compared} == {"speed", "slowed store", "exactness"}
    assert {entry.identical for entry in compared} == {1.0}
    exact = {entry.task for entry in compared if entry.task.startswith("exactness/")}
    assert exact == {
        f"exactness/k={k}, {index}, {drawn}"
        for k in SIZE.exact_k
        for index in ("flat", "hnsw")
        for drawn in ("greedy", "temperature 0.8")
    }


@pytest.mark.slow
def test_a_ratio_stands_beside_its_ceiling_and_what_is_simulated_says_so(measured: list[Measurement]) -> None:
    for entry in measured:
        simulated = entry.task.startswith("slowed store/") or "noisy copies" in entry.task
        assert entry.simulated == simulated, entry.task
        if entry.baseline == SEQUENTIAL and not entry.task.startswith("exactness/"):
            assert entry.speedup is not None
            assert float(str(entry.extra["best_stride_speedup"])) > 0
            assert (entry.ceiling is None) == ("respec" in entry.method), "a pass of several tokens"
            assert 0 <= float(str(entry.extra["match_rate"])) <= 1
    sequential = [entry for entry in measured if entry.method == SEQUENTIAL and "slowed" in entry.task]
    assert len(sequential) == 1
    assert (
        float(str(sequential[0].extra["retrieval_to_generation"])) > 0.5
    )  # of 2, on a machine that may be busy


@pytest.mark.slow
def test_a_finished_run_measures_nothing_again(out: Path, measured: list[Measurement]) -> None:
    records = out / ".records" / "knnlm.jsonl"
    before = records.read_bytes()
    assert bench(out, "--no-plots") == measured
    assert records.read_bytes() == before


# -- its parts ----------------------------------------------------------------------------------------------


def test_every_method_has_a_name_that_may_be_published() -> None:
    for size in (FULL, QUICK):
        for label in size.fast_methods:
            check_method(label)
            assert label in VARIANTS
    assert FULL.exact_prompts == 50
    assert set(FULL.exact_k) == {1, 8, 64, 256, 1024}
    assert [store.entries for store in FULL.fast] == [200_000, 1_000_000, 5_000_000]


def record(method: str, seconds: float, **figures: float) -> Record:
    whole = {"step_ms": 20.0, "chunks": 40.0, "retrieval_ms": 4.0, "generation_ms": 2.0, **figures}
    return Record(
        suite="knnlm",
        version="1",
        setting="here",
        key=RecordKey(task="t", row="r", method=method, repeat=0),
        outcome=Outcome(tokens=40, seconds=seconds, figures=whole),
    )


def test_the_best_stride_and_the_ceiling_at_the_measured_costs() -> None:
    records = [
        record(SEQUENTIAL, 4.8, search_1_ms=100.0),
        record(FIXED, 2.4, looked_up=20.0, matched=16.0, search_3_ms=120.0),
        record(UNCAPPED, 2.4, looked_up=20.0, matched=18.0, search_1_ms=100.0, search_3_ms=120.0),
    ]
    figures = Figures(records)
    expected = best_stride(0.02, lambda queries: 0.09 + 0.01 * queries, 0.8, False, 16)
    best = figures.best("t", FIXED)
    assert best.stride == expected.stride
    assert best.passages_per_second == pytest.approx(expected.passages_per_second)
    sequential, fixed, _ = summarise(records, baselines=[SEQUENTIAL])
    extra = figures.of(fixed)
    assert extra["best_stride_speedup"] == pytest.approx(expected.passages_per_second * 0.12)
    assert extra["ceiling"] == 3.0
    assert extra["match_rate"] == 0.8
    assert figures.of(sequential)["retrieval_to_generation"] == 2.0
    assert search_ms({2: 10.0}, 9) == 10.0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Datastore]:
    folder = tmp_path_factory.mktemp("store")
    build(folder)
    with Datastore.open(folder) as store:
        yield store


def test_copies_of_an_enlarged_datastore_stay_behind_the_originals(store: Datastore, tmp_path: Path) -> None:
    enlarge(store, tmp_path / "larger", 3 * len(store) + 7)
    with Datastore.open(tmp_path / "larger") as larger:
        larger.manifest.verify(tmp_path / "larger")
        assert len(larger) == 3 * len(store) + 7
        queries = store.halves[::40].view(np.float16).astype(np.float32)
        for mine, theirs in zip(
            store.index("flat").search(queries, 1), larger.index("flat").search(queries, 1), strict=True
        ):
            assert mine.ids.tolist() == theirs.ids.tolist()
            assert mine.distances.tolist() == theirs.distances.tolist()
        copied = np.arange(len(store), 2 * len(store))
        assert larger.values(copied).tolist() == store.values(copied - len(store)).tolist()


def test_a_slowed_index_answers_the_same_later(store: Datastore, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("benchmarks.knnlm.stores.time.sleep", slept.append)
    queries = store.halves[:2].view(np.float16).astype(np.float32)
    found = SlowedKeys(flat_keys(store), 0.5).search(queries, 3)
    assert [near.ids.tolist() for near in found] == [
        near.ids.tolist() for near in store.index("flat").search(queries, 3)
    ]
    assert slept == [0.5]


def test_wikitext_is_searched_and_continued_as_ordinary_text(tmp_path: Path) -> None:
    class Letters:
        def encode(self, text: str, *, special: bool) -> list[int]:
            return [ord(letter) for letter in text]

    (tmp_path / TEST).write_text(" = <unk> Bay = \n It 's a two @-@ part <unk> .\n", encoding="utf-8")
    (tmp_path / ".records").mkdir()
    context: Any = SimpleNamespace(data=tmp_path, out=tmp_path)
    models: Any = SimpleNamespace(get=lambda: SimpleNamespace(tokenizer=Letters()))
    (tokens,) = Stores(context, models).text(TEST, 1000)
    assert "".join(map(chr, tokens)).splitlines() == ["= Bay =", "It's a two-part."]
