"""Shards behind a server: conditions in both forms, and answers that are marked while one of them is down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specrag.retrieval.build import build
from specrag.retrieval.knowledge_base import KnowledgeBase
from specrag.retrieval.stores.registry import load
from tests.retrieval.stores.qdrant_server import QdrantServer
from tests.serving.live_server import MODEL, post, running_server


@pytest.mark.slow
def test_shards_are_searched_and_a_part_is_marked(smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "facts.jsonl").write_text(
        "".join(
            f'{{"title": "{name}", "text": "{name} melts at {degrees} degrees.", "year": {year}}}\n'
            for name, degrees, year in (
                ("Tin", 232, 1999),
                ("Zinc", 420, 2004),
                ("Lead", 327, 2010),
                ("Iron", 1538, 2015),
            )
        )
    )
    build([tmp_path / "facts.jsonl"], tmp_path / "kb")
    with QdrantServer() as first, QdrantServer() as second:
        both = f"{first.address('facts')},{second.address('facts')}"
        with KnowledgeBase.open(tmp_path / "kb") as base:
            load(f"shards:{both}", base)
        stores = {
            "facts": {"address": f"partial-shards:{both}", "connect_timeout": 1},
            "strict": {"address": f"shards:{both}", "connect_timeout": 1},
        }
        with running_server(stores=stores) as server:

            def search(name: str = "facts", **more: Any) -> Any:
                return post(server, f"/v1/kb/{name}/search", {"query": "When does tin melt?", "k": 4, **more})

            def titles(**more: Any) -> set[str]:
                return {hit["title"] for hit in search(**more).json()["data"]}

            answer = search().json()
            assert answer["data"][0]["title"] == "Tin"
            assert answer["missing_shards"] == []
            assert titles(where="year between 2000 and 2012 or title = Tin") == {"Tin", "Zinc", "Lead"}
            assert titles(where={"$not": {"year": {">": 2004}}}) == {"Tin", "Zinc"}
            assert search(where="year >=").status_code == 400
            assert search(where={"yaer": 1}).status_code == 400
            assert len(search("strict").json()["data"]) == 4
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": "At how many degrees does tin melt?"}],
                "max_tokens": 8,
                "temperature": 0,
                "specrag": {"kb": "facts", "k": 1, "where": {"year": {"<": 2003}}},
            }
            told = post(server, "/v1/chat/completions", body).json()["specrag"]
            assert [source["title"] for source in told["sources"]] == ["Tin"]
            assert told["usage"]["missing_shards"] == []
            second.stop()
            gone = second.address("facts")
            marked = search().json()
            assert marked["missing_shards"] == [gone]
            assert len(marked["data"]) == 2
            assert search("strict").status_code == 503
            told = post(server, "/v1/chat/completions", {**body, "specrag": {"kb": "facts", "k": 1}}).json()[
                "specrag"
            ]
            assert told["usage"]["missing_shards"] == [gone]
            second.start()
            assert search().json()["missing_shards"] == []
            server.wait_until_idle()
