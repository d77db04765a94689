"""The datastore on disk: what is in it, a kill at any moment, updates, and everything that does not belong together."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from specrag.errors import InputError
from specrag.methods.knn_lm.store import build as knn_build
from specrag.methods.knn_lm.store.datastore import Datastore
from specrag.methods.knn_lm.store.index import GraphSettings
from specrag.methods.knn_lm.store.manifest import (
    KEYS,
    VALUES,
    DatastoreError,
    DatastoreManifest,
    WindowSettings,
)
from specrag.methods.knn_lm.store.windows import entries_of, windows
from specrag.retrieval.manifest import KnowledgeBaseError
from specrag.retrieval.progress import Progress
from tests.kills import kills
from tests.methods.knn_store.knn_toys import VOCABULARY, build, record, texts, toy

ROOT = Path(__file__).resolve().parents[3]
SMALL = WindowSettings(tokens=16, context=4)


def _contents(folder: Path) -> tuple[bytes, bytes]:
    """Keys and next tokens."""
    with Datastore.open(folder) as store:
        store.manifest.verify(folder)
        return (store.folder / KEYS).read_bytes(), (store.folder / VALUES).read_bytes()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("tokens", "context"), [(2, 0), (5, 2), (16, 4), (500, 100)])
def test_windows_cover_every_token_once_with_its_context(tokens: int, context: int) -> None:
    settings = WindowSettings(tokens, context)
    documents = [*texts(3, 40), np.array([7], dtype=np.int32), np.array([1, 2], dtype=np.int32)]
    cut = list(windows(documents, settings))
    values = np.concatenate([window.values for window in cut])
    assert values.tolist() == [token for text in documents for token in text[1:].tolist()]
    assert len(values) == entries_of(documents)
    assert all(len(window.tokens) <= tokens for window in cut)
    assert all(len(window.tokens) - window.skipped == len(window.values) for window in cut)
    assert {window.skipped for window in cut} <= {0, context}


def test_entries_are_the_models_states_and_the_tokens_behind_them(tmp_path: Path) -> None:
    model, documents = toy(), texts()
    report = build(tmp_path, documents, windows=SMALL)
    assert (report.entries, report.documents, report.encoded) == (6 * 89, 6, 6 * 89)
    with Datastore.open(tmp_path) as store:
        values = store.values(np.arange(len(store)))
        assert values.tolist() == [token for text in documents for token in text[1:].tolist()]
        # The toy looks back two tokens, so that all but a window's first key know what they need.
        entry = 0
        for text in documents:
            for place in range(len(text) - 1):
                expected = model.logits(text[: place + 1].tolist()).astype(np.float16)
                assert np.array_equal(store.halves[entry].view(np.float16), expected)
                entry += 1
        (found,) = store.index("flat").search(store.halves[20:21].view(np.float16).astype(np.float32), 3)
        assert found.distances[0] == 0


def test_same_texts_change_nothing_and_others_are_read_alone(tmp_path: Path) -> None:
    folder, other = tmp_path / "one", tmp_path / "other"
    documents = texts(8)
    build(folder, documents[:5], windows=SMALL)
    assert build(folder, documents[:5]).encoded == 0
    assert DatastoreManifest.read(folder).generation == 1
    mixed = [documents[6], *documents[1:4], documents[7]]
    report = build(folder, mixed)
    build(other, mixed, windows=SMALL)
    assert 0 < report.encoded <= 2 * 89  # windows that the texts share are there already
    assert _contents(folder) == _contents(other)
    assert len(list((folder / "generations").iterdir())) == 1


def test_index_is_added_without_reading_anything_again(tmp_path: Path) -> None:
    build(tmp_path, windows=SMALL)
    before = _contents(tmp_path)
    assert build(tmp_path, indexes=[GraphSettings()]).encoded == 0
    assert _contents(tmp_path) == before
    with Datastore.open(tmp_path) as store:
        query = np.ones((2, VOCABULARY), dtype=np.float32)
        assert len(store.index("hnsw").search(query, 5)) == 2
        with pytest.raises(InputError, match="built without it"):
            store.index("pq")
        with pytest.raises(InputError, match="take one of flat, hnsw, pq"):
            store.index("ivf")
    build(tmp_path, texts(7))  # an update keeps the indexes that are there
    with Datastore.open(tmp_path) as store:
        assert len(store.index("hnsw").search(query, 5)) == 2


@pytest.fixture(scope="module")
def driver() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.methods.knn_store.knn_kill_driver"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline().strip() == "ready"
    yield process
    process.stdin.close()
    process.wait(30)
    process.stdout.close()


def _child(driver: subprocess.Popen[str], folder: Path, count: int, stop: int | None) -> dict[str, int]:
    assert driver.stdout is not None
    assert driver.stdin is not None
    driver.stdin.write(f"{json.dumps({'folder': str(folder), 'texts': count, 'stop': stop})}\n")
    driver.stdin.flush()
    answer: dict[str, int] = json.loads(driver.stdout.readline())
    assert answer["status"] in {0, signal.SIGKILL}, answer
    return answer


@pytest.mark.parametrize("update", [False, True])
def test_killed_at_any_file_operation(driver: subprocess.Popen[str], tmp_path: Path, update: bool) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    _child(driver, before, 4, None)
    if update:
        _child(driver, after, 4, None)
    undisturbed = _child(driver, after, 8, None)
    assert undisturbed["operations"] > 12
    encoded = []
    last = undisturbed["operations"] - 1
    for stop in [*random.sample(range(last), min(kills(3), last)), last]:
        folder = tmp_path / f"stopped-{stop}"
        if update:
            _child(driver, folder, 4, None)
        assert _child(driver, folder, 8, stop)["status"] == signal.SIGKILL, stop
        if DatastoreManifest.exists(folder):
            assert _contents(folder) in ([_contents(before)] if update else []) + [_contents(after)]
        else:
            assert not update
            with pytest.raises(DatastoreError, match="specrag index"):
                Datastore.open(folder)
        encoded.append(_child(driver, folder, 8, None)["encoded"])
        assert _contents(folder) == _contents(after), stop
        assert _names(folder) == ["generations", "manifest.json", "writer.lock"]
    assert encoded[-1] == 0 < undisturbed["encoded"]  # what was written before the kill is not made again


def test_interrupted_build_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knn_build, "CHECKPOINT", 30)
    folder = tmp_path / "store"

    def interrupt(progress: Progress) -> None:
        if progress.done > 200:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(folder, windows=SMALL, progress=interrupt)
    with pytest.raises(DatastoreError, match="unfinished: run `specrag index --knn-lm` again"):
        Datastore.open(folder)
    with (folder / "building" / "generation" / KEYS).open("ab") as keys:
        keys.write(b"half of a window")  # as a kill between two writes leaves it
    report = build(folder, windows=SMALL)
    assert report.entries - 220 < report.encoded < report.entries - 100
    build(tmp_path / "other", windows=SMALL)
    assert _contents(folder) == _contents(tmp_path / "other")


def test_unfinished_build_of_other_texts_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knn_build, "CHECKPOINT", 30)

    def interrupt(progress: Progress) -> None:
        if progress.done > 200:
            raise KeyboardInterrupt

    folder, documents = tmp_path / "store", texts(6, seed=3)
    with pytest.raises(KeyboardInterrupt):
        build(folder, texts(6), windows=SMALL, progress=interrupt)
    assert build(folder, documents, windows=SMALL).encoded == 6 * 89
    build(tmp_path / "other", documents, windows=SMALL)
    assert _contents(folder) == _contents(tmp_path / "other")
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "third", texts(6), windows=SMALL, progress=interrupt)
    other_model = record(fingerprint="1")
    assert (
        build(tmp_path / "third", texts(6), model=toy(1), made_by=other_model, windows=SMALL).encoded == 534
    )


@pytest.mark.parametrize("name", [KEYS, VALUES, "norms.f32"])
def test_truncated_file_is_refused_and_nothing_is_lost(tmp_path: Path, name: str) -> None:
    build(tmp_path, windows=SMALL)
    path = DatastoreManifest.read(tmp_path).generation_folder(tmp_path) / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DatastoreError, match=rf"{name}' has {len(whole) - 1:,} bytes, not {len(whole):,}"):
        Datastore.open(tmp_path)
    with pytest.raises(DatastoreError, match="it is damaged"):
        build(tmp_path, texts(7))
    path.write_bytes(whole)
    with Datastore.open(tmp_path) as store:
        assert len(store) == 534
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(DatastoreError, match="another checksum"):
        build(tmp_path, texts(7))  # which would have copied it
    path.unlink()
    with pytest.raises(DatastoreError, match="is missing"):
        Datastore.open(tmp_path)


def test_other_models_and_settings_are_refused(tmp_path: Path) -> None:
    build(tmp_path, windows=SMALL)
    before = _contents(tmp_path)
    cases = [
        (record("other", fingerprint="1"), DatastoreError, "'other' is not the one that made"),
        (record(dtype="bf16"), DatastoreError, "dtype: 'bf16' does not fit .* made in 'fp32'"),
    ]
    for made_by, error, message in cases:
        with pytest.raises(error, match=message):
            build(tmp_path, texts(7), made_by=made_by)
    with pytest.raises(InputError, match="was made with"):
        build(tmp_path, windows=WindowSettings(32, 4))
    with pytest.raises(InputError, match="at least two tokens"):
        build(tmp_path, [np.array([1], dtype=np.int32)])
    for tokens, context in ((1, 0), (16, 9), (16, -1)):
        with pytest.raises(InputError):
            WindowSettings(tokens, context)
    assert _contents(tmp_path) == before


def test_folders_that_are_no_datastore(tmp_path: Path) -> None:
    with pytest.raises(DatastoreError, match="does not exist"):
        Datastore.open(tmp_path / "none")
    with pytest.raises(DatastoreError, match="is no datastore"):
        Datastore.open(tmp_path)
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match=r"holds other files such as 'notes\.txt'"):
        build(tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_text('{"format": 1, "generation": 1}', encoding="utf-8")
    with pytest.raises(DatastoreError, match="is a knowledge base of passages"):
        Datastore.open(tmp_path)
    for content in ("", "[]", '{"kind": "knn-lm", "format": 1}'):
        manifest.write_text(content, encoding="utf-8")
        with pytest.raises(DatastoreError, match="it is damaged"):
            Datastore.open(tmp_path)
    manifest.write_text('{"kind": "knn-lm", "format": 9}', encoding="utf-8")
    with pytest.raises(DatastoreError, match="has format 9"):
        Datastore.open(tmp_path)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    def second(progress: Progress) -> None:
        with pytest.raises(KnowledgeBaseError, match="written by another process"):
            build(tmp_path)

    build(tmp_path, windows=SMALL, progress=second)


@pytest.mark.slow
def test_states_beyond_half_precision_are_refused(tmp_path: Path) -> None:
    model = toy()
    model.table *= 1e6
    with pytest.raises(InputError, match="do not fit half precision"):
        build(tmp_path, model=model)
