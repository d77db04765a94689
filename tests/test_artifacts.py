"""What is written through ``artifacts.py`` survives power losses and failing disks: the old content, or the new one."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from specrag import artifacts
from specrag.artifacts import (
    BUILDING,
    FileRecord,
    GenerationManifest,
    Refusal,
    atomic_write,
    check_target,
    disk_errors,
    exclusive_lock,
    make_folder,
    new_folder,
    publish_generation,
    remove_generations,
    rename,
)
from specrag.errors import InputError, SpecragError
from tests.power_loss import FailingDisk, attempt, check_power_loss, each_failure

OLD, NEW = b"old" * 1000, b"new content" * 2000


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


# -- a small file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [None, OLD])
def test_an_atomic_write_survives_a_power_loss(disk: Path, before: bytes | None) -> None:
    path = disk / "settings.json"
    if before is not None:
        path.write_bytes(before)
    states = check_power_loss(
        disk,
        lambda: atomic_write(path, NEW),
        lambda root: content(root / path.name),
        before=[before],
        after=NEW,
    )
    assert states >= 4


def write_without_sync(path: Path, data: bytes) -> None:
    new = path.with_name("new")
    new.write_bytes(data)
    new.replace(path)
    artifacts.fsync(path.parent)


def write_without_folder_sync(path: Path, data: bytes) -> None:
    new = path.with_name("new")
    new.write_bytes(data)
    artifacts.fsync(new)
    new.replace(path)


def write_in_place(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    artifacts.fsync(path)


@pytest.mark.parametrize("write", [write_without_sync, write_without_folder_sync, write_in_place])
def test_the_simulation_finds_what_is_not_synced(disk: Path, write: Any) -> None:
    path = disk / "settings.json"
    path.write_bytes(OLD)
    with pytest.raises(AssertionError, match=r"settings\.json"):
        check_power_loss(
            disk, lambda: write(path, NEW), lambda root: content(root / path.name), before=[OLD], after=NEW
        )


def test_an_atomic_write_on_a_failing_disk_leaves_the_old_content_and_nothing_else(disk: Path) -> None:
    path = disk / "settings.json"
    for failing in each_failure(disk):
        path.write_bytes(OLD)
        refused = attempt(failing, lambda: atomic_write(path, NEW))
        # New also where only the folder could not be synced.
        assert path.read_bytes() in ((OLD, NEW) if refused else (NEW,))
        assert os.listdir(disk) == [path.name]


def test_a_new_folder_has_its_name_for_good(disk: Path) -> None:
    check_power_loss(
        disk,
        lambda: make_folder(disk / "a" / "b"),
        lambda root: (root / "a" / "b").is_dir(),
        before=[False],
        after=True,
    )


def test_a_rename_is_for_good(disk: Path) -> None:
    (disk / "from").mkdir()
    (disk / "to").mkdir()
    (disk / "from" / "file").write_bytes(NEW)
    (disk / "to" / "file").write_bytes(OLD)

    def seen(root: Path) -> object:
        return content(root / "from" / "file"), content(root / "to" / "file")

    check_power_loss(
        disk,
        lambda: rename(disk / "from" / "file", disk / "to" / "file"),
        seen,
        before=[(NEW, OLD)],
        after=(None, NEW),
    )


# -- a folder ---------------------------------------------------------------------------------------------------


def replace_folder(disk: Path, data: bytes) -> None:
    with new_folder(disk / "model", disk / ".partial-model") as folder:
        (folder / "inner").mkdir()
        (folder / "weights").write_bytes(data)
        (folder / "inner" / "tokenizer").write_bytes(data)


def seen_folder(root: Path) -> bytes | str | None:
    """The content of both files; None without a folder."""
    folder = root / "model"
    if not folder.exists():
        return None
    parts = {content(folder / "weights"), content(folder / "inner" / "tokenizer")}
    return parts.pop() if len(parts) == 1 else "a mix"


@pytest.mark.parametrize("old", [False, True])
def test_a_folder_is_replaced_whole(disk: Path, old: bool) -> None:
    if old:
        replace_folder(disk, OLD)
    before = [OLD, None] if old else [None]
    assert (
        check_power_loss(disk, lambda: replace_folder(disk, NEW), seen_folder, before=before, after=NEW) > 6
    )
    assert os.listdir(disk) == ["model"]


def test_a_folder_on_a_failing_disk_is_the_old_one_or_the_new_one(disk: Path) -> None:
    for failing in each_failure(disk):
        replace_folder(disk, OLD)
        refused = attempt(failing, lambda: replace_folder(disk, NEW))
        back = [None] if failing.lasting else []  # the old one cannot be put back where no rename works
        assert seen_folder(disk) in ([OLD, NEW, *back] if refused else [NEW])
        replace_folder(disk, NEW)
        assert seen_folder(disk) == NEW
        assert os.listdir(disk) == ["model"]


def test_a_folder_that_is_not_finished_leaves_nothing(disk: Path) -> None:
    replace_folder(disk, OLD)
    with pytest.raises(KeyError), new_folder(disk / "model", disk / ".partial-model"):
        raise KeyError
    assert seen_folder(disk) == OLD
    assert os.listdir(disk) == ["model"]


# -- generations ------------------------------------------------------------------------------------------------


class LibraryError(SpecragError):
    """Something is wrong with a library."""


@dataclass(frozen=True, kw_only=True)
class Library(GenerationManifest):
    """A kind of artifact for these tests."""

    what: ClassVar[str] = "library"
    error: ClassVar[type[SpecragError]] = LibraryError
    rebuild: ClassVar[str] = "build it again"
    name: str

    def header(self) -> dict[str, Any]:
        return {"format": 1}

    @classmethod
    def parse(cls, _: Path, content: dict[str, Any]) -> Self:
        content.pop("format")
        return cls(files={n: FileRecord(**record) for n, record in content.pop("files").items()}, **content)

    @classmethod
    def missing(cls, folder: Path) -> SpecragError:
        return LibraryError(f"library: {str(folder)!r} does not exist")


def publish(folder: Path, data: bytes) -> None:
    """Build the next generation of two files, as the builds of knowledge bases and datastores do."""
    make_folder(folder)
    old = Library.read(folder).generation if Library.exists(folder) else 0
    new = folder / BUILDING / "generation"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for name in ("passages", "vectors"):
        (new / name).write_bytes(data)
    files = {name: FileRecord.of(new / name) for name in ("passages", "vectors")}
    publish_generation(folder, new, Library(generation=old + 1, files=files, name=data[:3].decode()))
    remove_generations(folder, keep=old + 1)
    shutil.rmtree(folder / BUILDING, ignore_errors=True)


def seen_library(root: Path) -> str | None:
    """The name that the manifest has and the files confirm; None without a manifest."""
    folder = root / "kb"
    if not Library.exists(folder):
        return None
    generation = Library.open(folder)
    generation.manifest.verify(folder)
    found = {path.read_bytes()[:3].decode() for path in generation.folder.iterdir()}
    generation.close()
    assert found == {generation.manifest.name}
    return generation.manifest.name


@pytest.mark.parametrize("old", [False, True])
def test_a_generation_is_published_whole(disk: Path, old: bool) -> None:
    if old:
        publish(disk / "kb", OLD)
    before = ["old"] if old else [None]
    states = check_power_loss(
        disk, lambda: publish(disk / "kb", NEW), seen_library, before=before, after="new"
    )
    assert states > 15


@pytest.mark.parametrize("left_out", ["passages", "generation", "generations"])
def test_every_sync_of_a_generation_is_needed(
    disk: Path, monkeypatch: pytest.MonkeyPatch, left_out: str
) -> None:
    publish(disk / "kb", OLD)
    fsync = artifacts.fsync
    monkeypatch.setattr(artifacts, "fsync", lambda path: None if path.name == left_out else fsync(path))
    with pytest.raises((AssertionError, LibraryError)):
        check_power_loss(disk, lambda: publish(disk / "kb", NEW), seen_library, before=["old"], after="new")


def test_a_generation_on_a_failing_disk_is_the_old_one_or_the_new_one(disk: Path) -> None:
    for failing in each_failure(disk):
        shutil.rmtree(disk / "kb", ignore_errors=True)
        publish(disk / "kb", OLD)
        refused = attempt(failing, lambda: publish(disk / "kb", NEW))
        assert seen_library(disk) in (("old", "new") if refused else ("new",))
        publish(disk / "kb", NEW)
        assert seen_library(disk) == "new"
        assert len(os.listdir(disk / "kb" / "generations")) == 1


def test_a_generation_stays_as_long_as_it_is_read(disk: Path) -> None:
    folder = disk / "kb"
    publish(folder, OLD)
    reader = Library.open(folder)
    publish(folder, NEW)
    assert (reader.folder / "vectors").read_bytes() == OLD
    reader.close()
    remove_generations(folder, keep=2)
    assert os.listdir(folder / "generations") == ["000002"]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(OLD[:-1]), "has 2,999 bytes, not 3,000"),
        (lambda path: path.write_bytes(OLD[:-1] + b"x"), "has another checksum than the one recorded"),
    ],
)
def test_a_damaged_file_is_named(disk: Path, damage: Any, named: str) -> None:
    publish(disk / "kb", OLD)
    damage(disk / "kb" / "generations" / "000001" / "vectors")
    with pytest.raises(LibraryError, match=rf"library: '.*vectors' {named}.*build it again"):
        Library.open(disk / "kb").manifest.verify(disk / "kb")


@pytest.mark.parametrize(
    "record", ['{"bytes": "1", "checksum": "0"}', '{"bytes": true, "checksum": "0"}', '{"bytes": 1}', "3"]
)
def test_a_damaged_manifest_is_named(disk: Path, record: str) -> None:
    (disk / "manifest.json").write_text(
        f'{{"format": 1, "generation": 1, "name": "x", "files": {{"a": {record}}}}}'
    )
    with pytest.raises(LibraryError, match=r"manifest\.json' cannot be read: it is damaged"):
        Library.read(disk)


def test_a_folder_with_other_files_is_no_target(disk: Path) -> None:
    (disk / "kb").mkdir()
    check_target(disk / "kb", "kb")
    (disk / "kb" / "diary.txt").write_text("Dear diary")
    with pytest.raises(InputError, match=r"kb: .*diary\.txt"):
        check_target(disk / "kb", "kb")
    with pytest.raises(InputError, match="it is a file"):
        check_target(disk / "kb" / "diary.txt", "kb")


# -- locks and messages -----------------------------------------------------------------------------------------


def test_a_second_writer_is_told(disk: Path) -> None:
    def busy() -> None:
        raise LibraryError("busy")

    second = exclusive_lock(disk / "lock", busy)
    with exclusive_lock(disk / "lock", busy), pytest.raises(LibraryError, match="busy"), second:
        pytest.fail("two writers")
    with exclusive_lock(disk / "lock", busy):
        pass


def test_refusals_are_described(disk: Path) -> None:
    told: list[Refusal] = []

    def described(refusal: Refusal) -> LibraryError:
        told.append(refusal)
        return LibraryError("one line")

    for number, full in ((28, True), (30, False)):
        failing = FailingDisk(disk, 1, number)
        with pytest.raises(LibraryError, match="one line"), disk_errors(disk, described), failing:
            atomic_write(disk / "file", NEW)
        assert told[-1] == Refusal(full, os.strerror(number))
    with pytest.raises(RuntimeError), disk_errors(disk, described):
        raise RuntimeError("of somebody else")
    with pytest.raises(LibraryError), disk_errors(disk, described, also=(RuntimeError,)):
        raise RuntimeError("write error in graph.faiss: 0 != 8 (No space left on device)")
    assert told[-1].full
