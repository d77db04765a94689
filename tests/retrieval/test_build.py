"""Making a knowledge base: what it holds, what cannot be read, what cannot be asked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specrag.errors import InputError
from specrag.retrieval.build import BuildSettings, build
from specrag.retrieval.encoder.encoder import default_dtype
from specrag.retrieval.manifest import Manifest
from specrag.retrieval.progress import Progress
from tests.retrieval.library import (
    HERONS,
    ROWS,
    encoder,
    index,
    passages,
    state,
)


def test_passages_keep_source_title_place_and_metadata(library: Path, kb: Path) -> None:
    report = index(library, kb=kb)
    assert (report.added, report.updated, report.removed, report.unchanged) == (3, 0, 0, 0)
    assert report.skipped == ()
    found = passages(kb)
    assert report.passages == len(found) == report.encoded
    ids = [passage.id for passage in found]
    assert ids == sorted(set(ids))
    assert 0 <= min(ids) <= max(ids) < 2**53
    gold = next(passage for passage in found if passage.title == "Gold")
    assert (gold.source, gold.place, gold.text) == ("facts.jsonl", "line 1", ROWS[0]["text"])
    assert gold.metadata == {"year": 1999, "tags": ["metal", "coin"]}
    herons = next(passage for passage in found if passage.source == "my birds/Reiher, größere.txt")
    assert herons.text == HERONS.strip()
    assert next(passage for passage in found if passage.source == "copper.md").title == "Copper"


def test_manifest_says_what_the_knowledge_base_is(library: Path, kb: Path) -> None:
    settings = BuildSettings(chunk_tokens=40, chunk_overlap=0)
    report = build([library], kb, settings, encoder=encoder())
    manifest = Manifest.read(kb)
    held = state(kb)
    assert (held.version, held.documents, held.passages) == (1, 3, report.passages)
    assert (manifest.encoder.name, manifest.encoder.dtype) == ("minilm-l6-v2", default_dtype())
    assert manifest.encoder.fingerprint == encoder().fingerprint
    assert (manifest.chunking.tokens, manifest.chunking.overlap) == (40, 0)
    assert held.roots == (os.path.realpath(library),)
    assert held.languages == ("english",)


def test_progress_goes_through_the_stages(library: Path, kb: Path) -> None:
    seen: list[Progress] = []
    build([library], kb, progress=seen.append, encoder=encoder())
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages == ["reading", "encoding", "indexing"]
    for stage in stages:
        done = [progress.done for progress in seen if progress.stage == stage]
        assert done == sorted(done)
        assert [p for p in seen if p.stage == stage][-1].done == [p for p in seen if p.stage == stage][
            -1
        ].total


# -- documents that cannot be read --------------------------------------------------------------------------


def test_unreadable_documents_are_reported_and_their_old_version_stays(library: Path, kb: Path) -> None:
    index(library, kb=kb)
    before = passages(kb)
    (library / "copper.md").write_bytes(bytes(range(256)) * 8)
    (library / "junk.pdf").write_bytes(b"no PDF")
    report = index(library, kb=kb)
    assert (report.added, report.updated, report.removed, report.unchanged) == (0, 0, 0, 3)
    reasons = {item.source: item.reason for item in report.skipped}
    assert set(reasons) == {"copper.md", "junk.pdf"}
    assert "the version indexed before stays" in reasons["copper.md"]
    assert "the version" not in reasons["junk.pdf"]
    assert passages(kb) == before
    (library / "copper.md").write_text("Copper is back.", encoding="utf-8")
    assert index(library, kb=kb).updated == 1


def test_document_that_changes_while_it_is_read_keeps_its_old_version(
    library: Path, kb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index(library, kb=kb)
    before = passages(kb)
    note = library / "copper.md"
    note.write_text("Copper is changing.", encoding="utf-8")
    real_fstat = os.fstat

    def write_after_the_look(descriptor: int) -> os.stat_result:
        status = real_fstat(descriptor)
        if os.path.samestat(status, note.stat()):
            with note.open("a", encoding="utf-8") as file:
                file.write(" It changes again.")
        return status

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", write_after_the_look)
        report = index(library, kb=kb)
    assert [item.source for item in report.skipped] == ["copper.md"]
    assert "changed while it was read" in report.skipped[0].reason
    assert "the version indexed before stays" in report.skipped[0].reason
    assert passages(kb) == before
    assert index(library, kb=kb).updated == 1


def test_nothing_readable_is_an_error(tmp_path: Path, kb: Path) -> None:
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "a.pdf").write_bytes(b"no PDF")
    with pytest.raises(InputError, match=r"none of the documents can be read, first a\.pdf"):
        index(tmp_path / "junk", kb=kb)
    assert not Manifest.exists(kb)


# -- settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "field", "value", "made"),
    [
        (BuildSettings(encoder="other-encoder"), "encoder", "other-encoder", "minilm-l6-v2"),
        (BuildSettings(encoder_dtype="int8"), "encoder_dtype", "int8", default_dtype()),
        (BuildSettings(chunk_tokens=100), "chunk_tokens", "100", "200"),
        (BuildSettings(chunk_overlap=0), "chunk_overlap", "0", "32"),
    ],
)
def test_other_settings_than_before_are_refused(
    settings: BuildSettings, field: str, value: str, made: str, library: Path, kb: Path
) -> None:
    index(library, kb=kb)
    with pytest.raises(InputError) as caught:
        build([library], kb, settings)
    for part in (field, value, made, "another folder"):
        assert part in str(caught.value)
    assert build([library], kb, BuildSettings("minilm-l6-v2", default_dtype(), 200, 32)).unchanged == 3


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (BuildSettings(chunk_tokens=15), "chunk_tokens"),
        (BuildSettings(chunk_tokens=255), "chunk_tokens"),  # MiniLM reads 256 with the special tokens
        (BuildSettings(chunk_tokens=100, chunk_overlap=51), "chunk_overlap"),
        (BuildSettings(chunk_overlap=-1), "chunk_overlap"),
        (BuildSettings(encoder="no-such-encoder"), "no-such-encoder"),
        (BuildSettings(encoder_dtype="fp7"), "encoder_dtype"),
    ],
)
def test_settings_that_cannot_be_used(settings: BuildSettings, field: str, library: Path, kb: Path) -> None:
    with pytest.raises(InputError, match=field):
        build([library], kb, settings)
    assert not Manifest.exists(kb)
