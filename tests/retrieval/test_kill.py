"""Changes that are killed: the knowledge base opens as before or as after, and a rerun finishes the work."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from specrag.artifacts import BUILDING, GENERATIONS
from specrag.retrieval import build as build_module
from specrag.retrieval.build import build, remove
from specrag.retrieval.manifest import KnowledgeBaseError, Manifest
from specrag.retrieval.passage import Passage
from specrag.retrieval.progress import Progress
from tests.kills import kills
from tests.retrieval.library import contents, encoder, index, passages, write_library

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """How a child's change ended; the figures of one that went through."""

    killed: bool
    encoded: int
    operations: int
    seconds: float


class Driver:
    """A process that has the encoder loaded and makes a child for each change."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.retrieval.kill_driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(
        self, action: str, paths: list[str], kb: Path, *, stop: int | None = None, after: float | None = None
    ) -> Outcome:
        """Change a knowledge base in a child.

        Args:
            stop: the step before which it is killed.
            after: seconds after which it is killed.
        """
        assert self.process.stdin is not None
        task = {"action": action, "paths": paths, "kb": str(kb), "stop": stop, "after": after}
        self.process.stdin.write(f"{json.dumps(task)}\n")
        self.process.stdin.flush()
        answer = json.loads(self._line())
        assert answer["status"] in {0, signal.SIGKILL}, answer
        killed = answer["status"] != 0
        return Outcome(
            killed, answer.get("encoded", 0), answer.get("operations", 0), answer.get("seconds", 0.0)
        )

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def driver(model_home: Path) -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.close()


@dataclass(frozen=True)
class Case:
    """A knowledge base that is to be changed.

    Attributes:
        action, paths: the change.
        start: a copy of the knowledge base before; not there for the first build.
        before, after: its passages.
        contents: all that an undisturbed change gives.
        undisturbed: how that change went.
    """

    action: str
    paths: list[str]
    start: Path
    before: list[Passage] | None
    after: list[Passage]
    contents: dict[str, object]
    undisturbed: Outcome


@pytest.fixture(scope="module", params=["first build", "update", "remove", "compact"])
def case(request: pytest.FixtureRequest, driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("case")
    library, start, done = folder / "library", folder / "start", folder / "done"
    write_library(library)
    before = None
    action, paths = "build", [str(library)]
    if request.param != "first build":
        index(library, kb=start)
        if request.param == "remove":
            action, paths = "remove", ["facts.jsonl"]
        elif request.param == "compact":
            remove(["facts.jsonl"], start)
            action, paths = "compact", []
        else:
            (library / "copper.md").unlink()
            for metal in ("tin", "lead", "zinc", "nickel"):
                (library / f"{metal}.txt").write_text(f"There is a mine of {metal}.", encoding="utf-8")
        before = passages(start)
        shutil.copytree(start, done)
    undisturbed = driver.run(action, paths, done)
    return Case(action, paths, start, before, passages(done), contents(done), undisturbed)


def _killed_and_finished(
    driver: Driver, case: Case, kb: Path, *, stop: int | None = None, after: float | None = None
) -> tuple[Outcome, Outcome]:
    """Kill a change, see that the knowledge base is as before or as after, and do it again."""
    if case.before is not None:
        shutil.copytree(case.start, kb)
    first = driver.run(case.action, case.paths, kb, stop=stop, after=after)
    if not Manifest.exists(kb):
        assert case.before is None
        with pytest.raises(KnowledgeBaseError, match=r"specrag index"):
            passages(kb)
    else:
        assert passages(kb) in ([case.after] if case.before is None else [case.before, case.after])
    second = first
    if case.action != "remove" or passages(kb) != case.after:
        second = driver.run(case.action, case.paths, kb)
    assert contents(kb) == case.contents
    assert {path.name for path in kb.iterdir()} - {BUILDING} == {GENERATIONS, "manifest.json", "writer.lock"}
    if case.action != "remove":
        assert not (kb / BUILDING).exists()
        assert len(list((kb / GENERATIONS).iterdir())) == 1
    return first, second


def test_killed_at_any_step(driver: Driver, case: Case, tmp_path: Path) -> None:
    operations = case.undisturbed.operations
    assert operations > 20
    points = random.sample(range(operations), min(kills(8), operations))
    encoded = []
    for stop in points:
        first, second = _killed_and_finished(driver, case, tmp_path / f"kb-{stop}", stop=stop)
        assert first.killed, stop
        encoded.append(second.encoded)
    if case.action == "build":
        assert (
            min(encoded) < case.undisturbed.encoded
        )  # what was encoded before the kill is not encoded again


def test_killed_at_any_moment(driver: Driver, case: Case, tmp_path: Path) -> None:
    killed = 0
    for number in range(kills(5)):
        after = random.uniform(0, case.undisturbed.seconds)
        first, _ = _killed_and_finished(driver, case, tmp_path / f"kb-{number}", after=after)
        killed += first.killed
    assert killed > 0


def test_interrupted_build_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "LOT", 2)
    library, kb = write_library(tmp_path / "library"), tmp_path / "kb"
    total = index(library, kb=tmp_path / "other").encoded

    def interrupt(progress: Progress) -> None:
        if progress.stage == "encoding" and progress.done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build([library], kb, progress=interrupt, encoder=encoder())
    with pytest.raises(KnowledgeBaseError, match="unfinished: run `specrag index` again"):
        passages(kb)
    report = index(library, kb=kb)
    assert 0 < report.encoded < total
    assert contents(kb) == contents(tmp_path / "other")


@pytest.mark.slow
def test_what_was_kept_is_used_unless_it_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "LOT", 2)
    library, kb = write_library(tmp_path / "library"), tmp_path / "kb"
    total = index(library, kb=tmp_path / "other").encoded

    def interrupt(progress: Progress) -> None:
        if progress.stage == "indexing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build([library], kb, progress=interrupt, encoder=encoder())
    (kept,) = kb.rglob("encoded.sqlite")
    whole = kept.read_bytes()
    assert len(whole) > total * 4 * encoder().dimension
    for damage in (whole[:100], b"", b"\xff" * 5000):
        kept.parent.mkdir(exist_ok=True)
        kept.write_bytes(damage)
        copy = shutil.copytree(kb, tmp_path / f"copy-{len(damage)}")
        assert index(library, kb=copy).encoded == total
        assert contents(copy) == contents(tmp_path / "other")
    kept.write_bytes(whole)
    assert index(library, kb=kb).encoded == 0
    assert contents(kb) == contents(tmp_path / "other")
