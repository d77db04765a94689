"""A model that is published is on the disk before it has its name, so that a power loss leaves no half of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from specrag.errors import SpecragError
from specrag.models.store import Store


def publish(store: Store, content: bytes) -> None:
    with store.locked("tiny"), store.publishing("tiny", "here", "Apache-2.0") as folder:
        (folder / "more").mkdir()
        (folder / "weights.safetensors").write_bytes(content)
        (folder / "more" / "tokenizer.json").write_bytes(content)


def test_all_of_it_is_synced_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[int, int] = {}  # size by inode
    named = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size

    def checked_rename(source: Path, target: Path) -> Path:
        unsynced = {path.name for path in (*source.rglob("*"), source) if path.stat().st_ino not in synced}
        assert unsynced == set()
        for path in source.rglob("*"):
            assert synced[path.stat().st_ino] == path.stat().st_size, path
        named.append(target.name)
        synced.pop(source.parent.stat().st_ino, None)
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", checked_rename)
    store = Store(tmp_path)
    publish(store, b"0" * 1000)
    assert named == ["tiny"]
    assert (tmp_path / "models").stat().st_ino in synced  # the name too
    assert store.check("tiny", thorough=True) is not None


def test_a_disk_that_fails_at_any_sync_leaves_the_old_model_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync
    for failing in range(1, 20):
        store = Store(tmp_path / str(failing))
        publish(store, b"old")
        count = 0

        def fails(descriptor: int, failing: int = failing) -> None:
            nonlocal count
            count += 1
            if count == failing:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            fsync(descriptor)

        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", fails)
            reason = ""
            try:
                publish(store, b"new")
            except SpecragError as error:
                reason = str(error)
        if not reason:
            assert failing > 5
            return
        assert "nput/output error" in reason
        manifest = store.check("tiny", thorough=True)
        assert manifest is not None
        content = {file: (store.folder("tiny") / file).read_bytes() for file in manifest.files}
        assert set(content.values()) in ({b"old"}, {b"new"})
    pytest.fail("it never got through")
