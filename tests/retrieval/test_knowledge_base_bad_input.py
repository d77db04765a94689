"""Knowledge bases that cannot be opened or written: one line that names what, where and what to do."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specrag.artifacts import BUILDING, MANIFEST
from specrag.errors import InputError, SpecragError
from specrag.models import catalog
from specrag.retrieval.build import BuildSettings, build, compact
from specrag.retrieval.encoder.encoder import load_encoder
from specrag.retrieval.knowledge_base import INDEXES, KnowledgeBase
from specrag.retrieval.maintenance import check
from specrag.retrieval.manifest import DATABASE, VECTORS, KnowledgeBaseError, Manifest, write_errors
from tests.kills import kills
from tests.retrieval.encoder.tiny_networks import write_encoder
from tests.retrieval.library import (
    contents,
    index,
    open_base,
    passages,
    run_python,
    write_library,
    write_rows,
)


@pytest.fixture(scope="module")
def made(model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    index(write_library(folder / "library"), kb=folder / "kb")
    return folder


@pytest.fixture
def kb(made: Path, tmp_path: Path) -> Path:
    """Give a copy that a test may spoil."""
    return Path(shutil.copytree(made / "kb", tmp_path / "kb"))


def _assert_line(error: SpecragError, *named: str) -> None:
    line = str(error)
    assert "\n" not in line
    assert [part for part in named if part not in line] == [], line


def _edit_manifest(kb: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((kb / MANIFEST).read_text(encoding="utf-8"))
    edit(content)
    (kb / MANIFEST).write_text(json.dumps(content), encoding="utf-8")


# -- opening ------------------------------------------------------------------------------------------------


def test_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(KnowledgeBaseError) as caught:
        open_base(tmp_path / "nothing")
    _assert_line(caught.value, str(tmp_path / "nothing"), "does not exist", "specrag index PATH --kb DIR")


def test_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("Dear reader", encoding="utf-8")
    for folder in (tmp_path, tmp_path / "letter.txt"):
        with pytest.raises(KnowledgeBaseError) as caught:
            open_base(folder)
        _assert_line(caught.value, str(folder), "specrag index")


def test_unfinished_folder(tmp_path: Path) -> None:
    (tmp_path / BUILDING).mkdir()
    with pytest.raises(KnowledgeBaseError) as caught:
        open_base(tmp_path)
    _assert_line(caught.value, str(tmp_path), "unfinished", "goes on where it was stopped")


@pytest.mark.parametrize("version", [0, 3, "2", None])
def test_other_format_version(version: object, kb: Path, made: Path) -> None:
    _edit_manifest(kb, lambda content: content.update(format=version))
    for use in (lambda: open_base(kb), lambda: index(made / "library", kb=kb)):
        with pytest.raises(KnowledgeBaseError) as caught:
            use()
        _assert_line(caught.value, str(kb), f"format {version!r}", "reads format 2", "build it again")


def test_a_knowledge_base_of_an_earlier_version_says_how_to_build_it_again(tmp_path: Path) -> None:
    made = {"format": 1, "generation": 3, "files": {}, "roots": ["/srv/my documents"], "passages": 2}
    (tmp_path / MANIFEST).write_text(json.dumps(made), encoding="utf-8")
    with pytest.raises(KnowledgeBaseError) as caught:
        open_base(tmp_path)
    _assert_line(caught.value, str(tmp_path), "format 1", "`specrag index '/srv/my documents' --kb DIR`")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda _: b"",
        lambda data: data[: len(data) // 2],
        lambda _: b"\xff" * 100,
        lambda _: b"[]",
        lambda _: b"{}",
        lambda _: b'{"format": 2}',
        lambda data: data.replace(b'"chunking"', b'"chonking"'),
        lambda data: data.replace(b'"dimension": 384', b'"dimension": "many"'),
        lambda data: data.replace(b'"generation": 1', b'"generation": "one"'),
    ],
)
def test_damaged_manifest(spoil: Callable[[bytes], bytes], kb: Path) -> None:
    data = (kb / MANIFEST).read_bytes()
    assert spoil(data) != data
    (kb / MANIFEST).write_bytes(spoil(data))
    with pytest.raises(KnowledgeBaseError) as caught:
        open_base(kb)
    _assert_line(caught.value, str(kb / MANIFEST), "damaged", "specrag index")


def _use_everything(kb: Path) -> None:
    with open_base(kb) as base:
        for name in INDEXES:
            base.search(["metal"], 1, index=name)


@pytest.mark.parametrize("name", [DATABASE, VECTORS])
@pytest.mark.parametrize("damage", ["cut", "missing", "other"])
def test_damaged_file_is_named(name: str, damage: str, kb: Path) -> None:
    path = Manifest.read(kb).generation_folder(kb) / name
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "other":
        path.write_bytes(b"\xff" * len(data))
    else:
        path.unlink()
    with pytest.raises(KnowledgeBaseError) as caught:
        _use_everything(kb)
    _assert_line(caught.value, str(path), "damaged", "build it again")
    if damage == "missing":
        with pytest.raises(KnowledgeBaseError, match=re.escape(name)):
            open_base(kb)


def test_flipped_bits_are_found_or_harmless(kb: Path, made: Path) -> None:
    right = _answers(made / "kb")
    draw, found = random.Random(), 0
    for number in range(kills(16)):
        copy = kb.with_name(f"flipped-{number}")
        shutil.copytree(kb, copy)
        path = Manifest.read(copy).generation_folder(copy) / draw.choice([DATABASE, VECTORS])
        data = bytearray(path.read_bytes())
        place = draw.randrange(len(data))
        data[place] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        try:
            check(copy)
            assert _answers(copy) == right, (path, place)
        except KnowledgeBaseError:
            found += 1
        shutil.rmtree(copy)
    assert found > 2


def _answers(kb: Path) -> object:
    with open_base(kb) as base:
        queries = ["Which metal is red?", "river water", "rust"]
        found = [base.search(queries, len(base), index=name) for name in INDEXES]
        filtered = [
            base.search(queries, len(base), index="flat", where=where)
            for where in ({"year": {">=": 2004}}, {"title": "Copper"}, {"tags": ["metal", "coin"]})
        ]
        return found, filtered, base.fields(), base.documents(), base.state


def test_missing_generation(kb: Path) -> None:
    shutil.rmtree(Manifest.read(kb).generation_folder(kb))
    with pytest.raises(KnowledgeBaseError) as caught:
        open_base(kb)
    _assert_line(caught.value, DATABASE, "is missing")


def test_damage_is_not_covered_up(kb: Path) -> None:
    path = Manifest.read(kb).generation_folder(kb) / VECTORS
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    more = kb.parent / "more.txt"
    more.write_text("Tin is soft.", encoding="utf-8")
    index(more, kb=kb)  # does not read the others
    for use in (lambda: compact(kb), lambda: _use_everything(kb), lambda: check(kb)):
        with pytest.raises(KnowledgeBaseError, match=r"vectors\.f32.*other? checksum"):
            use()
    with open_base(kb) as base:
        assert base.search(["red metal"], 1, index="bm25")[0][0].passage.title == "Copper"


# -- encoders -----------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    minilm = catalog.resolve("minilm-l6-v2").folder
    return write_encoder(tmp_path / "tiny", minilm)


def test_other_encoder(kb: Path, made: Path, tiny: Path) -> None:
    other = load_encoder(str(tiny))
    with pytest.raises(KnowledgeBaseError) as caught:
        KnowledgeBase.open(kb, encoder=other)
    _assert_line(caught.value, str(tiny), "minilm-l6-v2", "use that one")
    with pytest.raises(InputError) as refused:
        build([made / "library"], kb, encoder=other)
    _assert_line(refused.value, "encoder", str(tiny), "minilm-l6-v2", "another folder")


def test_encoder_that_has_changed_since(tiny: Path, made: Path, tmp_path: Path) -> None:
    kb = tmp_path / "kb"
    build([made / "library"], kb, BuildSettings(encoder=str(tiny), chunk_tokens=40))
    settings = tiny / "sentence_bert_config.json"
    settings.write_text(settings.read_text(encoding="utf-8").replace("64", "63"), encoding="utf-8")
    with KnowledgeBase.open(kb) as base:
        assert base.search(["metal"], 1, index="bm25")
        with pytest.raises(KnowledgeBaseError) as caught:
            base.search(["metal"], 1)
        _assert_line(caught.value, str(tiny), "does not fit the knowledge base", str(kb))
    (tmp_path / "more.txt").write_text("Tin is soft.", encoding="utf-8")
    with pytest.raises(KnowledgeBaseError, match="does not fit"):
        build([tmp_path / "more.txt"], kb)


# -- writing ------------------------------------------------------------------------------------------------


def test_file_in_place_of_the_folder(made: Path, tmp_path: Path) -> None:
    (tmp_path / "kb").write_text("a file", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        index(made / "library", kb=tmp_path / "kb")
    _assert_line(caught.value, "kb", str(tmp_path / "kb"), "it is a file; give a folder")
    with pytest.raises(KnowledgeBaseError) as refused:
        index(made / "library", kb=tmp_path / "kb" / "below")
    _assert_line(refused.value, str(tmp_path / "kb" / "below"), "cannot be written", "choose another folder")


def test_folder_with_other_files(made: Path, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("Dear reader", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        index(made / "library", kb=tmp_path)
    _assert_line(caught.value, "kb", str(tmp_path), "letter.txt", "a new or empty folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["letter.txt"]


def test_path_that_does_not_exist_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        index(tmp_path / "nothing", kb=tmp_path / "kb")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="nothing to index"):
        index(tmp_path / "empty", kb=tmp_path / "kb")
    assert not (tmp_path / "kb").exists()


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a folder where nobody may write")
def test_folder_that_cannot_be_written(made: Path) -> None:
    with pytest.raises(KnowledgeBaseError) as caught:
        index(made / "library", kb=Path("/sys/kernel/kb"))
    _assert_line(
        caught.value, "/sys/kernel/kb", "cannot be written", "make it writable, or choose another folder"
    )


def test_read_only_folder_is_read(kb: Path, made: Path) -> None:
    for path in [kb, *kb.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        with open_base(kb) as base:
            assert base.search(["red metal"], 1)[0][0].passage.title == "Copper"
        if os.geteuid() != 0:  # nothing is read-only for root
            more = kb.parent / "more.txt"
            more.write_text("Tin is soft.", encoding="utf-8")
            with pytest.raises(KnowledgeBaseError, match="cannot be written"):
                index(more, kb=kb)
    finally:
        for path in [kb, *kb.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


_LIMITED = """
import resource, sys
from pathlib import Path
from specrag.errors import SpecragError
from specrag.retrieval.build import build
from specrag.retrieval.encoder.encoder import load_encoder
encoder = load_encoder()
for limit in map(int, sys.argv[3:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        build([Path(sys.argv[1])], Path(sys.argv[2]), encoder=encoder)
        print("done")
    except SpecragError as error:
        print(error)
"""


@pytest.mark.slow
def test_disk_that_takes_no_more(tmp_path: Path) -> None:
    """The largest file that may be written stands for the space left: too little for each kind of file in turn."""
    library, kb = write_library(tmp_path / "library"), tmp_path / "kb"
    index(library, kb=kb)
    before = passages(kb)
    for number in range(30):
        (library / f"{number}.txt").write_text(f"Mine number {number} gives tin.", encoding="utf-8")
    reference = tmp_path / "reference"
    index(library, kb=reference)
    vectors = Manifest.read(reference).generation_folder(reference) / VECTORS
    limits = [0, 4096, 40_000, vectors.stat().st_size - 1]
    done = run_python(_LIMITED, library, kb, *map(str, limits))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(limits)
    for line, limit in zip(lines, limits, strict=True):
        assert line.startswith(f"knowledge base: {str(kb)!r}: "), (limit, line)
        # SQLite itself tells a full disk from others, but not a quota or a limit of a file's size.
        assert "no space is left" in line or "disk I/O error" in line, (limit, line)
        assert "what was there is intact" in line
    assert passages(kb) == before
    index(library, kb=kb)
    assert passages(kb) == passages(reference)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a file system of 1 MB; only root may make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk(small_disk: Path, made: Path, tmp_path: Path) -> None:
    kb = small_disk / "kb"
    index(made / "library", kb=kb)
    before = contents(kb)
    long = tmp_path / "long.jsonl"
    write_rows(long, [{"text": "Tin is soft.", "drawing": "x" * 1_000_000}])
    for _ in range(2):
        with pytest.raises(KnowledgeBaseError) as caught:
            index(long, kb=kb)
        _assert_line(caught.value, str(kb), "no space is left", "free some space", "intact")
        assert contents(kb) == before
    write_rows(long, [{"text": "Tin is soft.", "drawing": "x"}])
    assert index(long, kb=kb).added == 1


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no space is left"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "no space is left"),
        (OSError("1000 requested and 12 written"), "no space is left"),  # numpy's words for a short write
        (RuntimeError("write error in hnsw.faiss: 0 != 8 (No space left on device)"), "no space is left"),
        (OSError(errno.EROFS, "Read-only file system"), "cannot be written (Read-only file system)"),
        (OSError(errno.EACCES, "Permission denied"), "cannot be written (Permission denied)"),
    ],
)
def test_refusals_of_the_disk_are_named(error: Exception, named: str, tmp_path: Path) -> None:
    with pytest.raises(KnowledgeBaseError) as caught, write_errors(tmp_path):
        raise error
    _assert_line(caught.value, str(tmp_path), named)
