"""Uploads, their records and moves of documents after power losses and on failing disks: what was promised stays."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import pytest

pytest.importorskip("fastapi")

from starlette.requests import Request

from specrag.serving.knowledge.bases import KnowledgeBases
from specrag.serving.knowledge.jobs import Jobs
from specrag.serving.knowledge.places import Place
from specrag.serving.knowledge.staging import Job, move, read_job, take_back
from specrag.serving.knowledge.uploads import receive_files
from specrag.serving.settings import load_settings
from tests.power_loss import attempt, check_power_loss, each_failure

JOB = "0" * 32
OLD, NEW, OTHER = (
    b"# Tin\n\nTin melts at 232 degrees.\n",
    b"# Tin\n\nTin is soft.\n",
    b"# Lead\n\nLead is heavy.\n",
)
FILES = {"tin.md": NEW, "lead.md": OTHER}


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def upload(root: Path) -> None:
    """What a request with ``create`` does: a knowledge base, its documents, the promise of a job."""
    settings = load_settings(None, {"kb_root": str(root)})
    bases = KnowledgeBases(settings)
    place = bases.place("metals")
    parts = [
        b'--x\r\nContent-Disposition: form-data; name="files"; filename="%s"\r\n\r\n%s\r\n'
        % (name.encode(), data)
        for name, data in FILES.items()
    ]
    body = b"".join(parts) + b"--x--\r\n"

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", b"multipart/form-data; boundary=x")]
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)
    names = asyncio.run(receive_files(request, place.incoming / JOB, 10, 1 << 20))
    bases.create("metals")
    nobody = cast(Any, None)
    Jobs(bases, nobody, nobody, settings).add(Job(JOB, "metals", "key", "add", names, created=0.0))


def promised(root: Path) -> object:
    """The files of a job whose record is there, as the next start would find them."""
    place = Place(root / "metals")
    job = read_job(place.jobs / f"{JOB}.json")
    if job is None or not place.record.is_file():
        return None
    return {name: (place.incoming / JOB / name).read_bytes() for name in job.files}


def test_an_upload_that_was_promised_outlives_a_power_loss(disk: Path) -> None:
    assert check_power_loss(disk, lambda: upload(disk), promised, before=[None], after=FILES) > 15


def test_an_upload_on_a_failing_disk_is_promised_or_refused(disk: Path) -> None:
    for failing in each_failure(disk, few=20):
        shutil.rmtree(disk)
        disk.mkdir()
        refused = attempt_upload(failing, disk)
        # Refused behind the last rename it may have been promised nonetheless; the server discards its files then.
        assert promised(disk) in ([None, FILES] if refused else [FILES])


def attempt_upload(failing: Any, disk: Path) -> str:
    from specrag.serving.errors import ApiError

    try:
        return attempt(failing, lambda: upload(disk))
    except ApiError as error:
        return str(error) or "refused"


@pytest.mark.parametrize("failing", [False, True])
def test_a_jobs_record_is_the_old_one_or_the_new_one(disk: Path, failing: bool) -> None:
    upload(disk)
    settings = load_settings(None, {"kb_root": str(disk)})
    nobody = cast(Any, None)
    jobs = Jobs(KnowledgeBases(settings), nobody, nobody, settings)
    path = Path("metals") / "jobs" / f"{JOB}.json"
    old = read_job(disk / path)
    assert old is not None
    new = replace(old, status="done", report={"added": 2}, tries=1)
    if not failing:
        check_power_loss(
            disk, lambda: jobs.add(new), lambda root: read_job(root / path), before=[old], after=new
        )
        return
    for disk_failing in each_failure(disk):
        jobs.add(old)
        refused = attempt(disk_failing, lambda: jobs.add(new))
        assert read_job(disk / path) in ([old, new] if refused else [new])


def documents(place: Place) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(place.documents.iterdir()) if path.is_file()}


def stage(root: Path, action: Literal["add", "remove"]) -> tuple[Place, Job]:
    place = Place(root / "metals")
    place.documents.mkdir(parents=True)
    (place.documents / "tin.md").write_bytes(OLD)
    (place.incoming / JOB).mkdir(parents=True)
    for name, data in FILES.items() if action == "add" else ():
        (place.incoming / JOB / name).write_bytes(data)
    return place, Job(JOB, "metals", "key", action, tuple(FILES) if action == "add" else ("tin.md",))


def recovered(place: Place, job: Job) -> list[dict[str, bytes]]:
    """The documents after a start that goes on with the job, and after it has been taken back."""
    move(job, place)
    moved = documents(place)
    take_back(job, place, frozenset(job.files))
    return [moved, documents(place)]


@pytest.mark.parametrize("action", ["add", "remove"])
@pytest.mark.parametrize("step", ["move", "take back"])
def test_documents_that_are_moved_outlive_a_power_loss(
    disk: Path, action: Literal["add", "remove"], step: str
) -> None:
    place, job = stage(disk, action)
    right = [FILES if action == "add" else {}, {"tin.md": OLD}]
    if step == "take back":
        move(job, place)

    def act() -> None:
        if step == "move":
            move(job, place)
        else:
            take_back(job, place, frozenset(job.files))

    def seen(root: Path) -> object:
        return recovered(Place(root / "metals"), job)

    assert check_power_loss(disk, act, seen, before=[], after=right) > 1


@pytest.mark.parametrize("action", ["add", "remove"])
def test_documents_on_a_failing_disk_can_be_taken_back(disk: Path, action: Literal["add", "remove"]) -> None:
    for failing in each_failure(disk):
        shutil.rmtree(disk)
        place, job = stage(disk, action)
        refused = attempt(failing, lambda place=place, job=job: move(job, place))  # type: ignore[misc]
        if refused:
            take_back(job, place, frozenset(job.files))
            assert documents(place) == {"tin.md": OLD}
        assert recovered(place, job) == [FILES if action == "add" else {}, {"tin.md": OLD}]
