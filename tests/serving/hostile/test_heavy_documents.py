"""Documents that are small to send and dear to index: bounded, and their jobs can be cancelled."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from specrag.retrieval.documents.converters import ReadingLimits
from specrag.retrieval.documents.reader import read_file
from specrag.serving.knowledge.places import Place
from specrag.serving.knowledge.staging import Job
from tests.retrieval.sample_files import pdf, reason, written
from tests.serving.ops_server import Program, program, wait_for_job

MIB = 2**20
TIN = b"# Tin\n\nTin melts at 232 degrees.\n"


def bomb(pages: int, size: int) -> bytes:
    """A PDF whose pages share one stream, deflated twice, which unpacks to so many bytes."""
    stream = zlib.compress(zlib.compress(b"q Q " * (size // 4), 9), 9)
    kids = " ".join(f"{number + 4} 0 R" for number in range(pages))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Count {pages}/Kids[{kids}]>>".encode(),
        f"<</Length {len(stream)}/Filter[/FlateDecode/FlateDecode]>>stream\n".encode()
        + stream
        + b"\nendstream",
        *[b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]/Contents 3 0 R>>"] * pages,
    ]
    content, places = b"%PDF-1.4\n", []
    for number, item in enumerate(objects, 1):
        places.append(len(content))
        content += f"{number} 0 obj".encode() + item + b"endobj\n"
    table = b"".join(f"{place:010d} 00000 n \n".encode() for place in places)
    count = len(objects) + 1
    end = f"trailer<</Size {count}/Root 1 0 R>>\nstartxref\n{len(content)}\n%%EOF".encode()
    return content + f"xref\n0 {count}\n0000000000 65535 f \n".encode() + table + end


@pytest.fixture
def server(request: pytest.FixtureRequest, model_home: Path, tmp_path: Path) -> Iterator[Program]:
    limits = getattr(request, "param", {})
    with program(tmp_path, kb_root=str(tmp_path / "kb"), page=False, **limits) as running:
        yield running


def upload(asking: httpx.Client, kb: str, **files: bytes) -> str:
    """The id of the job."""
    asking.post("/v1/kb", json={"name": kb})
    named = [("files", (name.replace("_", "."), data)) for name, data in files.items()]
    answer = asking.post(f"/v1/kb/{kb}/documents", files=named)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["job"])


def wait_until(asking: httpx.Client, job: str, status: str) -> dict[str, Any]:
    ends = time.monotonic() + 60
    while True:
        told: dict[str, Any] = asking.get(f"/v1/kb/jobs/{job}").json()
        if told["status"] == status:
            return told
        assert time.monotonic() < ends, told
        time.sleep(0.05)


def test_too_many_pages_and_characters_are_not_read(tmp_path: Path) -> None:
    limits = ReadingLimits(pages=2, characters=40)
    assert "3 pages, more than 2" in reason(read_file(written(tmp_path, "a.pdf", pdf("A", "B", "C")), limits))
    assert "longer than 40" in reason(read_file(written(tmp_path, "b.pdf", pdf("B" * 30, "C" * 30)), limits))
    assert "longer than 40" in reason(read_file(written(tmp_path, "a.txt", "four" * 11), limits))
    rows = "".join(json.dumps({"text": "ten letter"}) + "\n" for _ in range(5))
    assert "longer than 40" in reason(read_file(written(tmp_path, "a.jsonl", rows), limits))
    assert read_file(written(tmp_path, "b.txt", "four" * 10), limits).documents
    assert read_file(written(tmp_path, "c.pdf", pdf("A", "B")), limits).documents


@pytest.mark.parametrize(
    "server", [{"max_document_pages": 50, "max_document_characters": 1000}], indirect=True
)
def test_the_rest_of_an_upload_is_indexed(server: Program) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as asking:
        job = upload(asking, "metals", many_pdf=bomb(51, 4), long_txt=b"Zinc. " * 200, tin_md=TIN)
        ended = wait_for_job(asking, job)
    assert (ended["status"], ended["report"]["added"]) == ("done", 1)
    assert {entry["source"] for entry in ended["report"]["skipped"]} == {"many.pdf", "long.txt"}


@pytest.mark.parametrize("server", [{"job_memory_bytes": 700 * MIB}], indirect=True)
def test_a_job_that_takes_too_much_memory_fails(server: Program) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as asking:
        bad = wait_for_job(asking, upload(asking, "metals", bomb_pdf=bomb(1000, 300 * MIB)))
        assert bad["status"] == "failed"
        assert "700 MiB of memory" in bad["error"]["message"]
        assert wait_for_job(asking, upload(asking, "metals", tin_md=TIN))["status"] == "done"


@pytest.mark.parametrize("server", [{"job_seconds": 5.0}], indirect=True)
def test_a_job_that_takes_too_long_fails(server: Program) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as asking:
        began = time.monotonic()
        bad = wait_for_job(asking, upload(asking, "metals", bomb_pdf=bomb(5000, 20 * MIB)))
    assert bad["status"] == "failed"
    assert "longer than 5 seconds" in bad["error"]["message"]
    assert time.monotonic() - began < 15


def test_jobs_are_cancelled(server: Program) -> None:
    """One that runs, and one that waits behind it; what was there stays, and others go on."""
    with httpx.Client(base_url=server.url, timeout=60) as asking:
        assert wait_for_job(asking, upload(asking, "metals", tin_md=TIN))["status"] == "done"
        running = upload(asking, "metals", bomb_pdf=bomb(5000, 20 * MIB))
        waiting = upload(asking, "metals", tin_md=TIN.replace(b"232", b"999"))
        last = upload(asking, "metals", lead_txt=b"Lead melts at 327 degrees.")
        wait_until(asking, running, "running")
        for job in (waiting, running):
            assert asking.delete(f"/v1/kb/jobs/{job}").status_code == 202
        for job in (running, waiting):
            wait_until(asking, job, "cancelled")
        assert wait_for_job(asking, last)["report"]["added"] == 1
        assert asking.delete(f"/v1/kb/jobs/{last}").status_code == 409
        assert asking.delete(f"/v1/kb/jobs/{'0' * 32}").status_code == 404
    place = Place(server.log.parent / "kb" / "metals")
    assert {path.name for path in place.documents.iterdir()} == {"tin.md", "lead.txt"}
    assert (place.documents / "tin.md").read_bytes() == TIN
    assert list(place.incoming.iterdir()) == []


def test_a_job_during_which_the_server_is_killed_is_given_up(model_home: Path, tmp_path: Path) -> None:
    with program(tmp_path, kb_root=str(tmp_path / "kb"), page=False) as server:
        with httpx.Client(base_url=server.url, timeout=60) as asking:
            job = upload(asking, "metals", bomb_pdf=bomb(5000, 20 * MIB))
            wait_until(asking, job, "running")
        for _ in range(2):
            server.end()
            server.start()
            with httpx.Client(base_url=server.url, timeout=60) as asking:
                wait_until(asking, job, "running")
        server.end()
        server.start()
        with httpx.Client(base_url=server.url, timeout=60) as asking:
            ended = wait_for_job(asking, job, 10)
            assert ended["status"] == "failed"
            assert "begun 3 times" in ended["error"]["message"]
            assert asking.get("/v1/kb/metals/documents").json()["data"] == []


def test_the_record_of_an_older_job_is_read(tmp_path: Path) -> None:
    """Written before tries were counted."""
    from specrag.serving.knowledge.staging import read_job

    record = asdict(Job("0" * 32, "metals", "key", "add", ("tin.md",)))
    del record["tries"], record["cancelled"]
    (tmp_path / "job.json").write_text(json.dumps(record), encoding="utf-8")
    found = read_job(tmp_path / "job.json")
    assert found is not None
    assert (found.tries, found.cancelled) == (0, False)
