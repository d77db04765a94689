"""A model that is published is on the disk before it has its name, so that a power loss leaves no half of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from specrag.models.catalog.store import Store
from tests.power_loss import attempt, check_power_loss, each_failure

OLD, NEW = b"old", b"new" * 1000


def publish(home: Path, content: bytes) -> None:
    store = Store(home)
    with store.locked("tiny"), store.publishing("tiny", "here", "Apache-2.0") as folder:
        (folder / "more").mkdir()
        (folder / "weights.safetensors").write_bytes(content)
        (folder / "more" / "tokenizer.json").write_bytes(content)


def seen(home: Path) -> bytes | str | None:
    """The content of all files, checked as it is when a model is loaded; None without a model."""
    store = Store(home)
    manifest = store.check("tiny", thorough=True)
    if manifest is None:
        return None
    content = {(store.folder("tiny") / file).read_bytes() for file in manifest.files}
    return content.pop() if len(content) == 1 else "a mix"


@pytest.mark.parametrize("old", [False, True])
def test_a_power_loss_leaves_a_whole_model_or_none(tmp_path: Path, old: bool) -> None:
    home = tmp_path / "home"
    home.mkdir()
    if old:
        publish(home, OLD)
    before = [OLD, None] if old else [None]
    assert check_power_loss(home, lambda: publish(home, NEW), seen, before=before, after=NEW) > 15


def test_a_disk_that_fails_at_any_operation_leaves_the_old_model_or_the_new_one(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for failing in each_failure(home):
        shutil.rmtree(home, ignore_errors=True)
        publish(home, OLD)
        refused = attempt(failing, lambda: publish(home, NEW))
        if refused:
            assert ("no space is left" if failing.lasting else "nput/output error") in refused
        back = [None] if failing.lasting else []  # the old one cannot be put back where no rename works
        assert seen(home) in ([OLD, NEW, *back] if refused else [NEW])
        assert os.listdir(home / "models") in (["tiny"], [])
