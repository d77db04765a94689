"""Knowledge bases that are deleted, a key that everybody can read, and a stop in the middle of a body."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest

pytest.importorskip("fastapi")

from tests.serving.ops_server import MASTER, WRITER, bearer, program, wait_for_job


def test_knowledge_bases_are_deleted(model_home: Path, tmp_path: Path) -> None:
    root = tmp_path / "kb"
    keys = [
        {"name": "master", "key": MASTER, "upload": True, "create": True},
        {"name": "writer", "key": WRITER, "upload": True},
    ]
    with program(tmp_path, page=False, kb_root=str(root), max_kbs=1, keys=keys) as server:
        with httpx.Client(base_url=server.url, timeout=60, headers=bearer(MASTER)) as asking:
            assert asking.post("/v1/kb", json={"name": "metals"}).status_code == 201
            files = [("files", ("tin.md", b"Tin melts at 232 degrees."))]
            job = asking.post("/v1/kb/metals/documents", files=files).json()["job"]
            assert asking.delete("/v1/kb/metals").status_code == 409  # it is being indexed
            wait_for_job(asking, job)
            query = {"query": "tin", "index": "bm25"}
            assert asking.post("/v1/kb/metals/search", json=query).status_code == 200
            assert asking.delete("/v1/kb/metals", headers=bearer(WRITER)).status_code == 403
            assert asking.delete("/v1/kb/metals").status_code == 204
            assert list(root.iterdir()) == []
            assert asking.post("/v1/kb/metals/search", json=query).status_code == 404
            assert asking.delete("/v1/kb/metals").status_code == 404
            assert asking.post("/v1/kb", json={"name": "others"}).status_code == 201  # there is room again
        server.end()
        (root / ".deleted-0" / "documents").mkdir(parents=True)  # of a kill in the middle of it
        server.start()
        assert [path.name for path in root.iterdir()] == ["others"]


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_key_file_that_everybody_can_read_is_told(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    file.write_text(MASTER, encoding="utf-8")
    file.chmod(mode)
    with program(tmp_path, page=False, api_key_file=str(file)) as server:
        told = "key file readable by all" in server.log.read_text(encoding="utf-8")
    assert told == (mode == 0o644)


def test_a_stop_does_not_wait_for_a_half_sent_body(tmp_path: Path) -> None:
    with program(tmp_path, page=False, shutdown_seconds=2) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as half:
            half.sendall(b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\nx")
            time.sleep(0.5)
            began = time.monotonic()
            server.end(signal.SIGTERM)
            assert time.monotonic() - began < 4
        for line in server.log.read_text(encoding="utf-8").splitlines():
            assert json.loads(line)["level"] != "error", line
