"""Documents that are replaced by what cannot be read: the old ones stay, and the job says that it failed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from specrag.artifacts import rename as renamed
from specrag.serving.knowledge.places import Place
from specrag.serving.knowledge.staging import Job, move, not_indexed, take_back
from tests.serving.ops_server import Program, program, wait_for_job

TIN = b"# Tin\n\nTin melts at 232 degrees.\n"
UNREADABLE = b"%PDF-1.4\nthis is none\n"


@pytest.fixture(scope="module")
def server(model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    folder = tmp_path_factory.mktemp("replaced")
    with program(folder, kb_root=str(folder / "kb"), page=False) as running:
        yield running


def uploaded(asking: httpx.Client, **files: bytes) -> dict[str, Any]:
    named = [("files", (name.replace("_", "."), data)) for name, data in files.items()]
    answer = asking.post("/v1/kb/metals/documents", files=named)
    assert answer.status_code == 202, answer.text
    return wait_for_job(asking, answer.json()["job"])


def test_a_document_stays_until_the_one_that_replaces_it_is_indexed(server: Program) -> None:
    from tests.retrieval.sample_files import pdf

    good = pdf("Zinc melts at 420 degrees.")
    folder = server.log.parent / "kb" / "metals"
    with httpx.Client(base_url=server.url, timeout=120) as asking:
        assert asking.post("/v1/kb", json={"name": "metals"}).status_code == 201
        assert uploaded(asking, zinc_pdf=good, tin_md=TIN)["status"] == "done"
        failed = uploaded(asking, zinc_pdf=UNREADABLE)
        assert failed["status"] == "failed"
        assert "zinc.pdf" in failed["error"]["message"]
        assert (folder / "documents" / "zinc.pdf").read_bytes() == good
        found = asking.post("/v1/kb/metals/search", json={"query": "zinc melts", "k": 1, "index": "bm25"})
        assert "420" in found.json()["data"][0]["text"]
        # Beside a good one the good one is taken.
        mixed = uploaded(asking, zinc_pdf=UNREADABLE, tin_md=TIN.replace(b"232", b"231.9"))
        assert (mixed["status"], mixed["report"]["updated"]) == ("done", 1)
        assert [entry["source"] for entry in mixed["report"]["skipped"]] == ["zinc.pdf"]
        assert (folder / "documents" / "zinc.pdf").read_bytes() == good
        assert b"231.9" in (folder / "documents" / "tin.md").read_bytes()
        assert list((folder / "incoming").iterdir()) == []
        # What was there is not read again by the next job.
        again = uploaded(asking, lead_txt=b"Lead melts at 327 degrees.")
        assert (again["report"]["added"], again["report"]["unchanged"]) == (1, 2)


@pytest.mark.parametrize("action", ["add", "remove"])
def test_moves_go_on_from_wherever_a_kill_leaves_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: Any
) -> None:
    """Killed behind each rename of a job whose documents the index does not take, the old ones are there at its end."""
    import specrag.serving.knowledge.staging as staging

    class Killed(BaseException):
        pass

    def run(place: Place, steps: int) -> bool:
        left = [steps]

        def rename(source: Path, target: Path) -> None:
            if not left[0]:
                raise Killed
            left[0] -= 1
            renamed(source, target)

        monkeypatch.setattr(staging, "rename", rename)
        job = Job("0" * 32, "metals", "key", action, ("tin.md", "new.md") if action == "add" else ("tin.md",))
        try:
            move(job, place)
            known = {str((place.documents / "tin.md").resolve()): "of the old one"}
            take_back(job, place, not_indexed(job, place, known))
        except Killed:
            return False
        return True

    for steps in range(10):
        place = Place(tmp_path / str(steps))
        (place.incoming / ("0" * 32)).mkdir(parents=True)
        place.documents.mkdir()
        (place.documents / "tin.md").write_bytes(TIN)
        if action == "add":
            for name in ("tin.md", "new.md"):
                (place.incoming / ("0" * 32) / name).write_bytes(UNREADABLE)
        whole = run(place, steps)
        assert run(place, 100)
        assert [path.name for path in place.documents.iterdir()] == ["tin.md"]
        assert (place.documents / "tin.md").read_bytes() == TIN
        if whole:
            return
    pytest.fail("ten steps are more than such a job has")
