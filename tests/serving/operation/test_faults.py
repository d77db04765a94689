"""What goes wrong below a server: it is killed, its disk is full, its database goes away. Nothing promised is lost."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from tests.kills import kills
from tests.serving.ops_server import Program, program, wait_for_job

METALS = [f"{name}-{number}" for name in ("copper", "tin", "zinc", "lead") for number in range(40)]


def client(server: Program) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=120)


def upload(asking: httpx.Client, *files: tuple[str, bytes]) -> httpx.Response:
    return asking.post("/v1/kb/metals/documents", files=[("files", file) for file in files])


def documents(asking: httpx.Client) -> list[str]:
    listed = asking.get("/v1/kb/metals/documents", params={"limit": 1000}).json()["data"]
    return [entry["id"] for entry in listed]


def kill_at(server: Program, asking: httpx.Client, job: str, stage: str) -> None:
    """Kill the server when a job has come so far."""
    ends = time.monotonic() + 120
    while True:
        report = asking.get(f"/v1/kb/jobs/{job}").json()
        if report["stage"] == stage:
            break
        assert report["status"] in {"waiting", "running"}, report
        assert time.monotonic() < ends
        time.sleep(0.002)
    server.end()


@pytest.mark.parametrize("stage", ["reading", "encoding", "indexing"])
def test_a_kill_during_uploads_and_indexing_loses_nothing_promised(tmp_path: Path, stage: str) -> None:
    """Killed in the middle of one upload, and while documents of another are read, encoded or indexed."""
    incoming = tmp_path / "kb" / "metals" / "incoming"
    with program(tmp_path, kb_root=str(tmp_path / "kb"), page=False) as server:
        with client(server) as asking:
            assert asking.post("/v1/kb", json={"name": "metals"}).status_code == 201
            with socket.create_connection(("127.0.0.1", server.port)) as half:
                half.sendall(
                    b"POST /v1/kb/metals/documents HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999\r\n"
                    b"Content-Type: multipart/form-data; boundary=b\r\n\r\n"
                    b'--b\r\nContent-Disposition: form-data; name="files"; filename="half.txt"\r\n\r\nhalf'
                )
                ends = time.monotonic() + 30
                while not list(incoming.glob("*/half.txt")):
                    assert time.monotonic() < ends
                    time.sleep(0.01)
                files = [(f"{name}.txt", f"{name} is a metal. " * 8) for name in METALS]
                answer = upload(asking, *[(name, text.encode()) for name, text in files])
                job = answer.json()["job"]
                kill_at(server, asking, job, stage)
        server.start()
        with client(server) as asking:
            assert not list(incoming.glob("*/half.txt"))
            ended = wait_for_job(asking, job, 120)
            assert ended["status"] == "done", ended
            assert documents(asking) == sorted(f"{name}.txt" for name in METALS)
            assert "half" not in " ".join(documents(asking))
            assert list(incoming.iterdir()) == []
            found = asking.post("/v1/kb/metals/search", json={"query": "zinc", "k": 1, "index": "bm25"})
            assert found.json()["data"][0]["source"].startswith("zinc-")


def test_kills_at_any_moment_of_a_job_lose_no_document(tmp_path: Path) -> None:
    """Uploaded, killed a moment later, started again: each time all documents are there and none of them is new."""
    with program(tmp_path, kb_root=str(tmp_path / "kb"), page=False) as server:
        with client(server) as asking:
            assert asking.post("/v1/kb", json={"name": "metals"}).status_code == 201
        names: list[str] = []
        for number in range(kills(2)):
            names.append(f"metal-{number}.txt")
            with client(server) as asking:
                answer = upload(asking, (names[-1], f"Metal {number} is a metal. ".encode() * 40))
                assert answer.status_code == 202, answer.text
                time.sleep(random.uniform(0, 0.6))
            server.end()
            server.start()
            with client(server) as asking:
                ended = wait_for_job(asking, answer.json()["job"], 120)
                assert ended["status"] == "done", ended
                assert documents(asking) == sorted(names)
                assert list((tmp_path / "kb" / "metals" / "incoming").iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a file system of 2 MB; only root may make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_told_and_leaves_what_was_there(small_disk: Path, tmp_path: Path) -> None:
    with program(tmp_path, kb_root=str(small_disk), page=False) as server, client(server) as asking:
        assert asking.post("/v1/kb", json={"name": "metals"}).status_code == 201
        job = upload(asking, ("tin.txt", b"Tin melts at 232 degrees.")).json()["job"]
        assert wait_for_job(asking, job)["status"] == "done"

        def is_intact() -> bool:
            found = asking.post("/v1/kb/metals/search", json={"query": "tin", "k": 1, "index": "bm25"})
            assert found.status_code == 200, found.text
            return bool("232" in found.json()["data"][0]["text"])

        # It does not fit while it arrives.
        answer = upload(asking, ("large.txt", b"large " * 500_000))
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "disk_full")
        assert is_intact()
        # It fits, and its index does not.
        rows = b"\n".join(b'{"text": "row %d %s"}' % (number, b"x" * 200) for number in range(4000))
        answer = upload(asking, ("rows.jsonl", rows[:1_200_000]))
        assert answer.status_code == 202, answer.text
        job = wait_for_job(asking, answer.json()["job"])
        assert job["status"] == "failed"
        assert "no space is left" in job["error"]["message"]
        assert is_intact()
        assert "disk" in asking.get("/readyz").json()["reasons"]
        # With some space again it goes on.
        job = upload(asking, ("zinc.txt", b"Zinc melts at 420 degrees.")).json()["job"]
        assert wait_for_job(asking, job)["status"] == "done"
        assert documents(asking) == ["tin.txt", "zinc.txt"]


def test_a_database_that_goes_away_is_told_and_found_again(tmp_path: Path) -> None:
    if find_spec("pgserver") is None or find_spec("psycopg") is None:
        pytest.skip("pgserver has no wheel for this Python or this machine")
    from specrag.bench.postgres import PostgresServer
    from specrag.retrieval.build import build
    from specrag.retrieval.knowledge_base import KnowledgeBase
    from specrag.retrieval.stores.registry import load

    (tmp_path / "tin.txt").write_text("Tin melts at 232 degrees.", encoding="utf-8")
    build([tmp_path / "tin.txt"], tmp_path / "tin")
    with PostgresServer() as database:
        with KnowledgeBase.open(tmp_path / "tin") as base:
            load(f"{database.url}#tin", base)
        tables: dict[str, Any] = {"metals": {"url": database.url, "table": "tin"}}
        with program(tmp_path, tables=tables, page=False) as server, client(server) as asking:

            def search() -> httpx.Response:
                return asking.post("/v1/kb/metals/search", json={"query": "When does tin melt?", "k": 5})

            assert "232" in search().json()["data"][0]["text"]
            assert asking.get("/v1/kb").json()["data"][0]["kind"] == "table"
            assert upload(asking, ("a.txt", b"a")).json()["error"]["code"] == "read_only"
            database.stop("immediate")
            gone = search()
            assert (gone.status_code, gone.json()["error"]["code"]) == (503, "store_unavailable")
            assert gone.headers["retry-after"]
            assert "postgresql" not in gone.text
            assert asking.get("/healthz").status_code == 200
            database.start()
            ends = time.monotonic() + 30
            while (back := search()).status_code == 503:
                assert time.monotonic() < ends
            assert "232" in back.json()["data"][0]["text"]
