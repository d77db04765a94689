"""``specrag bench`` as its user meets it: files, resuming after a kill, errors, and the code's version."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from specrag.bench.measurement import from_json_lines
from specrag.bench.registry import NAMES, SuiteRegistry, built_in_suites
from specrag.bench.runner import code_version
from specrag.cli.bench import bench_command
from specrag.errors import InputError, ModelFilesError, SpecragError
from tests.bench.small_suite import METHODS, PHRASES, REPEATS, registry
from tests.serving.live_server import wait_for

ROOT = Path(__file__).resolve().parents[2]
RUNS = len(PHRASES) * REPEATS * len(METHODS)


def run(*words: str, suites: SuiteRegistry | None = None) -> str:
    app = typer.Typer()
    app.command("bench")(bench_command(suites or registry()))
    result = CliRunner().invoke(app, words)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_a_run_writes_lines_page_and_picture(tmp_path: Path) -> None:
    figures = tmp_path / "figures.jsonl"
    page = run("small", "--quick", "--out", str(tmp_path), "--json", str(figures))
    measurements = from_json_lines(figures.read_text())
    assert measurements == from_json_lines((tmp_path / "small.jsonl").read_text())
    assert {entry.task for entry in measurements} == {"a", "b", "c", "overall"}
    indexed = [entry for entry in measurements if entry.method == "ralmspec+index"]
    assert all(entry.identical == 1.0 and entry.accuracy == 1.0 for entry in indexed)
    assert all((entry.speedup or 0) > 1 for entry in indexed)  # a look-up beats a scan
    assert {entry.command for entry in measurements} == {"specrag bench small --quick"}
    assert (tmp_path / "small.md").read_text() in page
    assert "![small.png](small.png)" in page
    assert (tmp_path / "small.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / ".records" / ".gitignore").read_text() == "*\n"


def test_json_on_stdout_is_json_alone(tmp_path: Path) -> None:
    out = run("small", "--out", str(tmp_path), "--json", "-", "--no-plots")
    assert len(from_json_lines(out)) == 8
    assert not (tmp_path / "small.png").exists()


def records_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / ".records" / "small.jsonl").read_bytes().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def test_a_run_killed_with_kill_9_goes_on_where_it_stopped(tmp_path: Path) -> None:
    log = tmp_path / "log"
    out = tmp_path / "out"
    command = [sys.executable, "-m", "tests.bench.small_suite", "small", "--out", str(out), "--no-plots"]
    environment = os.environ | {"SMALL_SUITE_LOG": str(log), "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 120
        while not log.exists() or len(log.read_text().splitlines()) < 21:  # in the third row of six
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not (out / "small.jsonl").exists(), "no results of a half-done run"
    kept = records_of(out)
    assert 0 < len(kept) < RUNS
    with open(out / ".records" / "small.jsonl", "ab") as file:
        file.write(b'{"suite": "small", "ver')  # a kill in the middle of a write

    log.unlink()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = records_of(out)
    assert after[: len(kept)] == kept, "records of the first run are kept as they were"
    keys = [json.dumps(record["key"]) for record in after]
    assert len(set(keys)) == RUNS
    assert len(keys) - RUNS < len(METHODS)  # at most the half of a repeat was run again
    finished = {
        phrase for phrase in PHRASES if sum(f'"row": "{phrase}"' in key for key in keys[: len(kept)]) == 6
    }
    assert len(finished) >= 2
    again = {line.split()[0] for line in log.read_text().splitlines()}
    assert again == set(PHRASES) - finished
    assert {entry.n for entry in from_json_lines((out / "small.jsonl").read_text())} == {2, 6}


_SLEEPER = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(300)"
_IN_ANOTHER_PROCESS = """
import sys
import typer
from specrag.bench import SuiteRegistry
from specrag.bench.memory import run_module
from specrag.cli.bench import bench_command

class Elsewhere:
    name, summary = "elsewhere", "Measures in another process."

    def run(self, context):
        run_module("sleeping", "sleeper")
        yield from ()

app = typer.Typer()
app.command("bench")(bench_command(SuiteRegistry({"elsewhere": Elsewhere})))
app(sys.argv[1:])
"""


def test_a_run_that_is_ended_ends_the_process_it_measures_in(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(_SLEEPER)
    told = tmp_path / "pid"
    words = [sys.executable, "-c", _IN_ANOTHER_PROCESS, "elsewhere", "--out", "out"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: told.is_file() and told.read_text(), 60)
        process.terminate()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "the same command goes on from here" in said
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)


def test_fresh_starts_again_and_resume_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("SMALL_SUITE_LOG", str(log))
    run("small", "--out", str(tmp_path), "--no-plots")
    log.unlink()
    run("small", "--out", str(tmp_path), "--no-plots")
    assert not log.exists()
    run("small", "--out", str(tmp_path), "--no-plots", "--quick")
    assert log.exists(), "a quick run does not use a full run's records"
    log.unlink()
    run("small", "--out", str(tmp_path), "--no-plots", "--fresh")
    assert log.exists()


def test_more_repeats_are_added_to_those_that_are_there(tmp_path: Path) -> None:
    run("small", "--out", str(tmp_path), "--no-plots")
    before = records_of(tmp_path)
    run("small", "--out", str(tmp_path), "--no-plots", "--repeats", "5")
    after = records_of(tmp_path)
    assert after[: len(before)] == before
    assert len(after) == RUNS * 5 // REPEATS


def test_rows_are_limited_by_task_and_added_to_those_that_are_there(tmp_path: Path) -> None:
    run("small", "--out", str(tmp_path), "--no-plots", "--rows", "1")
    before = records_of(tmp_path)
    assert len(before) == RUNS // 2  # one of two rows of each task
    assert "--rows 1" in (tmp_path / "small.md").read_text()
    run("small", "--out", str(tmp_path), "--no-plots")
    after = records_of(tmp_path)
    assert after[: len(before)] == before
    assert len(after) == RUNS


def test_tasks_and_methods_are_chosen_by_patterns_and_added_to_later(tmp_path: Path) -> None:
    run("small", "--out", str(tmp_path), "--no-plots", "--task", "[ab]", "--method", "seq*")
    keys = [record["key"] for record in records_of(tmp_path)]
    assert {(key["task"], key["method"]) for key in keys} == {("a", METHODS[0]), ("b", METHODS[0])}
    assert "--task '[ab]' --method 'seq*'" in (tmp_path / "small.md").read_text()
    run("small", "--out", str(tmp_path), "--no-plots")
    assert len({tuple(record["key"].values()) for record in records_of(tmp_path)}) == RUNS


def test_a_pattern_that_matches_nothing_is_told_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--task.*quality/\*.*it matches none of a, b, c"):
        run("small", "--out", str(tmp_path), "--no-plots", "--task", "a", "--task", "quality/*")
    with pytest.raises(InputError, match=r"--method.*it matches none of sequential, ralmspec\+index"):
        run("small", "--out", str(tmp_path), "--no-plots", "--method", "Sequential")
    assert {record["key"]["task"] for record in records_of(tmp_path)} == {"a"}  # what was found is not lost
    assert not (tmp_path / "small.md").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["smal"], "did you mean small"),
        (["tokens"], "this version has small"),
        (["small", "--repeats", "0"], "--repeats"),
        (["small", "--rows", "0"], "--rows"),
        (["small", "--threads", "0"], "--threads"),
        (["small", "--device", "abacus"], "--device"),
        (["small", "--data", "/no/such/folder"], "--data"),
        (["small", "--out", "/proc/none"], "--out"),
    ],
)
def test_what_cannot_be_used_is_named(words: list[str], message: str) -> None:
    with pytest.raises(SpecragError, match=message) as caught:
        run(*words)
    assert "\n" not in str(caught.value)


def test_the_built_in_suites_are_those_that_exist() -> None:
    suites = built_in_suites()
    assert suites.names == NAMES
    assert set(NAMES) == {path.parent.name for path in (ROOT / "benchmarks").glob("*/suite.py")}
    for name in suites.names:
        assert suites.get(name).name == name
    with pytest.raises(InputError, match="this version has"):
        suites.get("zzz")


def test_without_the_repository_one_line_says_where_the_suites_are(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", "import sys; sys.modules['benchmarks'] = None\n"]
    command[-1] += "from specrag.cli.main import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    for words, code in ((["bench", "engine"], 1), (["bench", "--help"], 0)):
        done = subprocess.run(
            [*command, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        if code:
            assert "from a clone of the repository" in done.stderr
            assert len(done.stderr.strip().splitlines()) == 1
        else:
            assert "engine, retrieval, tokens" in done.stdout


def test_a_library_that_a_suite_misses_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "benchmarks.engine.suite", raising=False)
    monkeypatch.setitem(sys.modules, "specrag.bench.bounds", None)
    with pytest.raises(ModuleNotFoundError, match="bounds"):
        built_in_suites().get("engine")


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


def test_the_version_changes_when_the_package_does_and_only_then(tmp_path: Path) -> None:
    package = tmp_path / "src" / "tool"
    package.mkdir(parents=True)
    source = package / "a.py"
    source.write_text("x = 1\n")
    assert "+" not in code_version(package), "no checkout: the release alone"
    git(tmp_path, "init")
    before_any_commit = code_version(package)
    assert "dirty" in before_any_commit
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    clean = code_version(package)
    assert "dirty" not in clean
    (tmp_path / "notes.md").write_text("words")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "documents")
    assert code_version(package) == clean
    source.write_text("x = 2\n")
    dirty = code_version(package)
    assert dirty.startswith(f"{clean}.dirty")
    (package / "b.py").write_text("")
    assert code_version(package) not in (clean, dirty)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "second")
    second = code_version(package)
    assert second not in (clean, dirty)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "suite.py").write_text("y = 1\n")
    assert code_version(package).startswith(f"{second}.dirty"), "what measures counts as well"


def test_drafters_to_compare_are_checked_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="small does not"):
        run("small", "--adapter", str(tmp_path))
    for name in ("a", "b"):
        (tmp_path / name / "drafter").mkdir(parents=True)
    same = [str(tmp_path / name / "drafter") for name in ("a", "b")]
    with pytest.raises(InputError, match="rename the folder"):
        run("answers", "--adapter", same[0], "--adapter", same[1], suites=built_in_suites())
    with pytest.raises(InputError, match="no such folder"):
        run("answers", "--adapter", str(tmp_path / "nowhere"), suites=built_in_suites())
    config = {"peft_type": "LORA", "base_model_name_or_path": "smollm2-135m"}
    (Path(same[0]) / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFilesError, match="no weights"):
        run("answers", "--adapter", same[0], suites=built_in_suites())
    with pytest.raises(ModelFilesError, match="was trained for 'smollm2-135m'"):
        run("answers", "--adapter", same[0], "--model", "gemma-3-270m", suites=built_in_suites())


def test_a_dtype_is_checked_before_anything_runs() -> None:
    said = "small chooses its dtypes itself, answers, server and tokens do not"
    with pytest.raises(InputError, match=said):
        run("small", "--dtype", "int8")
    with pytest.raises(InputError, match="use bf16 or int8"):
        run("answers", "--dtype", "fp32", suites=built_in_suites())
