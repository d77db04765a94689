"""``specrag bench tokens`` and ``exactness``: short runs with the real model, and the parts of the long ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.tokens import scale as token_scale
from benchmarks.tokens import subjects as token_subjects
from benchmarks.tokens.quality import METHODS
from benchmarks.tokens.suite import _size, questions
from specrag.bench.measurement import Measurement, check_method, from_json_lines
from specrag.cli.main import app
from tests.processor import PACKED_BF16


def bench(suite: str, out: Path, *words: str) -> list[Measurement]:
    command = ["bench", suite, "--quick", "--no-plots", "--out", str(out), "--json", "-", *words]
    result = CliRunner().invoke(app, command)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return from_json_lines(result.stdout)


@PACKED_BF16
@pytest.mark.slow
def test_a_quick_run_of_tokens_measures_ours_and_theirs(smollm2: Path, tmp_path: Path) -> None:
    found = bench("tokens", tmp_path)
    overall = {
        entry.method: entry for entry in found if entry.task == "overall" and entry.baseline == "plain"
    }
    assert set(overall) == {"adaptive", "transformers", "transformers-lookup"}
    adaptive = overall["adaptive"]
    assert adaptive.mat is not None
    assert adaptive.mat > 1
    assert adaptive.speedup is not None
    assert adaptive.acceptance_by_source is not None
    assert {"recycling"} <= set(adaptive.acceptance_by_source)
    assert overall["transformers"].acceptance_by_source is None
    share = adaptive.speedup / float(str(adaptive.extra["steps_speedup"]))
    assert 0.5 < share <= 1.05, "no run is faster than its own guesses and checks"
    page = (tmp_path / "tokens.md").read_text(encoding="utf-8")
    assert "transformers-lookup" in page


@pytest.mark.slow
def test_a_quick_run_of_exactness_finds_no_difference(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.exactness.suite._NEW_TOKENS", 64)
    found = bench("exactness", tmp_path)
    assert {entry.method for entry in found} == {
        "adaptive", "respec", "respec+recycling", "prompt-lookup", "token-recycling", "sam-decoding",
        "eagle-2", "eagle-2+cost-aware", "adaptive+eagle-2", "sam-decoding+eagle-2", "prompt-lookup+eagle-2",
    }  # fmt: skip
    assert {entry.task.split("/")[1] for entry in found} == {"greedy", "temperature 0.8"}
    for entry in found:
        assert entry.identical == 1.0, entry
        assert entry.dtype == "int8"
        assert entry.extra["failed_batches"] == 0
        assert entry.n > 0


@pytest.mark.parametrize(
    ("rows", "quick", "larger", "found"),
    [(None, False, False, 8), (17, False, False, 17), (2, True, True, 2)],
)
def test_as_many_questions_of_each_task_as_are_asked_for(
    rows: int | None, quick: bool, larger: bool, found: int
) -> None:
    assert _size(rows, quick=quick, larger=larger).per_task == found


def test_every_method_has_a_name_that_may_be_published() -> None:
    headed = token_subjects.headed("smollm2-135m")
    for methods in (token_subjects.OURS, token_subjects.DRAFTED, headed, token_subjects.ABLATION, METHODS):
        for label, make in methods.items():
            check_method(label)
            make()


def test_a_larger_models_text_is_compared_with_the_draft_models_guesses() -> None:
    compared = token_subjects.lossless("qwen2.5-coder-1.5b")
    assert {"adaptive", "draft-model", "adaptive+draft-model"} < set(compared)
    assert not [label for label in compared if label == "plain" or "relaxed" in label or "eagle" in label]


def test_the_cost_of_a_proposal_is_measured() -> None:
    import numpy as np

    tokens = np.random.default_rng(0).integers(0, 50, 3000).astype(np.int32)
    own = token_scale._context(tokens)
    corpus = token_scale._corpus(tokens)
    for outcome in (own, corpus):
        assert 0 < outcome.figures["proposal_us"] < 50_000
    assert own.figures["bytes_a_token"] > 4
    assert corpus.figures["bytes_a_token"] >= 8


def test_reported_questions_have_even_ids_and_all_tasks(measuring_data: Path) -> None:
    class Context:
        data = measuring_data

    found = questions(Context(), 3)  # type: ignore[arg-type]
    assert len(found) == 18
    assert all(int(question.identifier) % 2 == 0 for question in found)
    assert len({question.task for question in found}) == 6
