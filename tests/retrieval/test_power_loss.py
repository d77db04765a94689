"""Knowledge bases and datastores after a power loss and on failing disks: as before or as after."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrag.methods.knn_lm.store import build as knn_build
from specrag.methods.knn_lm.store.datastore import Datastore
from specrag.methods.knn_lm.store.manifest import DatastoreManifest, WindowSettings
from specrag.retrieval import build as build_module
from specrag.retrieval.build import compact, remove
from specrag.retrieval.manifest import Manifest
from tests.methods.knn_store import knn_toys
from tests.power_loss import FailingDisk, PowerLoss, attempt, check_power_loss, each_failure
from tests.retrieval.library import contents, index, write_library

WINDOWS = WindowSettings(tokens=16, context=4)


@pytest.fixture(params=["first build", "update"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder that holds no knowledge base, or one whose library has changed."""
    monkeypatch.setattr(build_module, "LOT", 2)
    library, disk = write_library(tmp_path / "library"), tmp_path / "disk"
    disk.mkdir()
    if request.param == "update":
        index(library, kb=disk / "kb")
        (library / "copper.md").unlink()
        (library / "tin.txt").write_text("There is a mine of tin.", encoding="utf-8")
    return disk


def assert_refusal(disk: FailingDisk, message: str) -> None:
    """What a user is told is one line, and says what is wrong with the disk."""
    if message:
        assert "\n" not in message
        assert ("no space is left" if disk.lasting else "nput/output error") in message


def seen_base(root: Path) -> object:
    """All that an undisturbed build gives; None without a knowledge base."""
    kb = root / "kb"
    if not Manifest.exists(kb):
        return None
    return contents(kb)


def test_a_knowledge_base_after_a_power_loss(disk: Path, tmp_path: Path) -> None:
    library, before = tmp_path / "library", seen_base(disk)
    shutil.copytree(disk, tmp_path / "done")
    index(library, kb=tmp_path / "done" / "kb")
    after = seen_base(tmp_path / "done")
    assert before != after
    start = shutil.copytree(disk, tmp_path / "start")
    check_power_loss(disk, lambda: index(library, kb=disk / "kb"), seen_base, before=[before], after=after)
    # What a power loss leaves is taken up by a rerun.
    loss = PowerLoss(start)
    loss.run(lambda: index(library, kb=start / "kb"))
    for number, state in enumerate(random.sample(loss.during, 8)):
        left = state.write(tmp_path / f"left-{number}")
        index(library, kb=left / "kb")
        assert seen_base(left) == after


def test_a_knowledge_base_on_a_failing_disk(disk: Path, tmp_path: Path) -> None:
    library, before = tmp_path / "library", seen_base(disk)
    start = shutil.copytree(disk, tmp_path / "start")
    shutil.copytree(disk, tmp_path / "done")
    index(library, kb=tmp_path / "done" / "kb")
    after = seen_base(tmp_path / "done")
    for failing in each_failure(disk, few=6):
        shutil.rmtree(disk)
        shutil.copytree(start, disk)
        refused = attempt(failing, lambda: index(library, kb=disk / "kb"))
        assert_refusal(failing, refused)
        assert seen_base(disk) in ((before, after) if refused else (after,))
        index(library, kb=disk / "kb")
        assert seen_base(disk) == after


@pytest.mark.parametrize("change", ["remove", "compact"])
def test_a_smaller_knowledge_base_after_a_power_loss(tmp_path: Path, change: str) -> None:
    disk, done = tmp_path / "disk", tmp_path / "done"
    index(write_library(tmp_path / "library"), kb=disk / "kb")
    if change == "compact":
        remove(["copper.md"], disk / "kb")
    shutil.copytree(disk, done)
    actions: dict[str, Callable[[Path], object]] = {
        "remove": lambda root: remove(["copper.md"], root / "kb"),
        "compact": lambda root: compact(root / "kb"),
    }
    before = seen_base(disk)
    actions[change](done)
    after = seen_base(done)
    assert (before == after) == (change == "compact")
    check_power_loss(disk, lambda: actions[change](disk), seen_base, before=[before], after=after)


def build_store(root: Path, texts: int) -> None:
    knn_toys.build(root / "store", knn_toys.texts(texts, length=40), windows=WINDOWS)


def seen_store(root: Path) -> object:
    """Keys, norms and tokens of every entry; None without a datastore."""
    folder = root / "store"
    if not DatastoreManifest.exists(folder):
        return None
    with Datastore.open(folder) as store:
        store.manifest.verify(folder)
        values = store.raw_values(np.arange(len(store))).tolist()
        return store.halves.tobytes(), values, store.manifest.documents


@pytest.mark.parametrize("old", [0, 1])
def test_a_datastore_after_a_power_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: int) -> None:
    monkeypatch.setattr(knn_build, "CHECKPOINT", 20)
    disk = tmp_path / "disk"
    disk.mkdir()
    if old:
        build_store(disk, old)
    before = seen_store(disk)
    build_store(tmp_path, 3)
    after = seen_store(tmp_path)
    start = shutil.copytree(disk, tmp_path / "start")
    check_power_loss(disk, lambda: build_store(disk, 3), seen_store, before=[before], after=after)
    loss = PowerLoss(start)
    loss.run(lambda: build_store(start, 3))
    for number, state in enumerate(random.sample(loss.during, 20)):
        left = state.write(tmp_path / f"left-{number}")
        build_store(left, 3)
        assert seen_store(left) == after


@pytest.mark.parametrize("old", [0, 1])
def test_a_datastore_on_a_failing_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: int) -> None:
    monkeypatch.setattr(knn_build, "CHECKPOINT", 20)
    disk, start = tmp_path / "disk", tmp_path / "start"
    start.mkdir()
    if old:
        build_store(start, old)
    before = seen_store(start)
    build_store(tmp_path, 3)
    after: Any = seen_store(tmp_path)
    for failing in each_failure(disk, few=6):
        shutil.rmtree(disk, ignore_errors=True)
        shutil.copytree(start, disk)
        refused = attempt(failing, lambda: build_store(disk, 3))
        assert_refusal(failing, refused)
        assert seen_store(disk) in ((before, after) if refused else (after,))
        build_store(disk, 3)
        assert seen_store(disk) == after
