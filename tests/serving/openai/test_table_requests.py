"""Answers from a table of PostgreSQL, while it is there and while it is not."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from specrag.retrieval.build import build
from specrag.retrieval.knowledge_base import KnowledgeBase
from tests.serving.live_server import MODEL, post, running_server


@pytest.mark.skipif(
    find_spec("pgserver") is None or find_spec("psycopg") is None,
    reason="pgserver has no wheel for this Python or this machine",
)
def test_a_chat_is_answered_from_a_table_and_told_when_that_is_gone(smollm2: Path, tmp_path: Path) -> None:
    from specrag.bench.postgres import PostgresServer
    from specrag.retrieval.stores.registry import load

    (tmp_path / "tin.txt").write_text("Tin melts at 232 degrees.", encoding="utf-8")
    build([tmp_path / "tin.txt"], tmp_path / "tin")
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "At how many degrees does tin melt?"}],
        "max_tokens": 16,
        "temperature": 0,
        "specrag": {"kb": "metals", "k": 1},
    }
    with PostgresServer() as database:
        with KnowledgeBase.open(tmp_path / "tin") as base:
            load(f"{database.url}#tin", base)
        tables = {"metals": {"url": database.url, "table": "tin"}}
        with running_server(tables=tables) as server:

            def chat() -> httpx.Response:
                return post(server, "/v1/chat/completions", body)

            answer = chat().json()
            assert "232" in answer["choices"][0]["message"]["content"]
            assert "232" in answer["specrag"]["sources"][0]["text"]
            database.stop("immediate")
            gone = chat()
            assert gone.status_code == 503
            assert gone.json()["error"]["code"] == "store_unavailable"
            assert "postgresql" not in gone.text
            alone = post(server, "/v1/chat/completions", {**body, "specrag": {}})
            assert alone.status_code == 200
            database.start()
            ends = time.monotonic() + 30
            while (back := chat()).status_code == 503:
                assert time.monotonic() < ends
            assert back.json()["choices"] == answer["choices"]
            server.wait_until_idle()
