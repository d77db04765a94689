"""``python -m benchmarks.results``: what is run, what is not run again, and what is said of a page's figures."""

from __future__ import annotations

import argparse
import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.results import RECORDS, STEPS, Step, check_version, compare, main, ratios, run
from specrag.bench.measurement import Measurement, from_json_lines, to_json_lines
from specrag.errors import InputError
from tests.serving.live_server import wait_for


@pytest.fixture
def given(tmp_path: Path) -> argparse.Namespace:
    (tmp_path / "data").mkdir()
    return argparse.Namespace(out=tmp_path, data=tmp_path / "data", quick=False)


@pytest.fixture
def writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Step:
    """A step that adds a line to a file of its folder and ends as ``code.txt`` says."""
    (tmp_path / "writer.py").write_text(
        "import pathlib, sys\n"
        "out, data = map(pathlib.Path, sys.argv[1:])\n"
        "assert data.is_dir()\n"
        "with (out / 'lines').open('a') as file:\n    file.write('x')\n"
        "print('said')\n"
        "sys.exit(int((out.parent / 'code.txt').read_text()))\n"
    )
    monkeypatch.setattr(results, "ROOT", tmp_path)
    return Step("engine", "writer OUT DATA")


def test_a_step_that_is_done_is_not_run_again(given: argparse.Namespace, writes: Step) -> None:
    code, lines = given.out / "code.txt", given.out / "step" / "lines"
    code.write_text("1")
    assert not run("step", writes, given)
    code.write_text("0")
    assert run("step", writes, given)
    assert run("step", writes, given)
    assert lines.read_text() == "xx"
    assert (given.out / "step.log").read_text() == "said\n" * 2


_STEP = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], 'pid').write_text(str(os.getpid())); time.sleep(300)"
_RESULTS = """
import pathlib
import sys
from benchmarks import results

results.ROOT = pathlib.Path(sys.argv[3])
results.STEPS = {"step": results.Step("engine", "sleeper OUT")}
results.main()
"""


def test_a_run_that_is_ended_ends_its_step(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(_STEP)
    words = [sys.executable, "-c", _RESULTS, str(tmp_path / "out"), "--data", str(tmp_path)]
    process = subprocess.Popen(words)
    told = tmp_path / "out" / "step" / "pid"
    wait_for(lambda: told.is_file() and told.read_text())
    process.terminate()
    assert process.wait() == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)


def test_figures_of_two_versions_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    check_version(out)
    check_version(out)
    monkeypatch.setattr(results, "code_version", lambda: "another")
    with pytest.raises(InputError, match="remove it, or go on there"):
        check_version(out)
    monkeypatch.setattr("sys.argv", ["results", str(out), "--data", str(tmp_path), "--only", "retrieval"])
    monkeypatch.setattr("signal.signal", lambda *_: None)  # would stay behind the test
    with pytest.raises(SystemExit, match="it is of"):
        main()


def test_a_step_without_its_environment_is_left_out(
    given: argparse.Namespace,
    writes: Step,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SPECRAG_NOWHERE", raising=False)
    step = Step(writes.page, writes.words, needs="SPECRAG_NOWHERE")
    assert run("step", step, given)
    assert "left out, SPECRAG_NOWHERE is not set" in capsys.readouterr().out
    assert not (given.out / "step" / "done").exists()


def test_every_step_names_a_page_and_its_record() -> None:
    for step in STEPS.values():
        pages, guides = RECORDS.parent, RECORDS.parents[1]
        assert any((folder / f"{step.page}.md").is_file() for folder in (pages, guides))
        assert bool(step.quick) == bool(step.record)
        if step.record:
            assert ratios(
                from_json_lines(gzip.decompress((RECORDS / f"{step.record}.jsonl.gz").read_bytes()).decode())
            )


def test_what_has_moved_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RECORDS", tmp_path)
    monkeypatch.setattr(results, "STEPS", {"step": Step("engine", "", "quick", "kept")})

    def entry(method: str, speedup: float | None) -> Measurement:
        return Measurement(
            suite="engine", task="overall", method=method, baseline="plain", device="cpu", n=1, command="c",
            version="v", date="2026-11-27", speedup=speedup, speedup_low=speedup, speedup_high=speedup,
        )  # fmt: skip

    kept = [entry("adaptive", 1.5), entry("respec", 2.0), entry("prompt-lookup", 1.0)]
    (tmp_path / "kept.jsonl.gz").write_bytes(gzip.compress(to_json_lines(kept).encode()))
    (tmp_path / "step").mkdir()
    now = [
        entry("adaptive", 1.3),
        entry("respec", 1.2),
        entry("sam-decoding", 1.0),
        entry("prompt-lookup", None),
    ]
    (tmp_path / "step" / "engine.jsonl").write_text(to_json_lines(now))
    assert list(compare("step", tmp_path / "step")) == [
        "holds  step: overall: adaptive over plain: 1.50 on the page, 1.30 now\n",
        "MOVED  step: overall: respec over plain: 2.00 on the page, 1.20 now\n",
    ]
