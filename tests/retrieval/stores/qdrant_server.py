"""Qdrant's engine behind the part of its REST interface that specrag uses.

No package that can be had here brings Qdrant's server. ``qdrant-edge-py`` brings its engine, the same Rust code that
stores, filters and scores; the few routes around it are the test's own, as the official client calls them.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import pytest

edge: Any = pytest.importorskip("qdrant_edge")  # there is no wheel for every Python and machine


class QdrantServer:
    """A server on a port of its own; its data are gone after :meth:`close`.

    Args:
        key: that requests must carry.

    Attributes:
        before: is called with the path of each request; may wait, or return a status to fail with.
        requests: paths that were asked for.
    """

    def __init__(self, key: str = "") -> None:
        self.key = key
        self.before: Callable[[str], int | None] = lambda _: None
        self.requests: list[str] = []
        self._folder = Path(tempfile.mkdtemp(prefix="specrag-qdrant-"))
        self._collections: dict[str, tuple[edge.EdgeShard, dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self.port = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def address(self, name: str) -> str:
        """Of a collection."""
        return f"qdrant://127.0.0.1:{self.port}/{name}"

    def start(self) -> None:
        """Listen, after a stop again on the same port with the same data."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def close(self) -> None:
        """Stop, and remove the data."""
        self.stop()
        for shard, _ in self._collections.values():
            shard.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Any:
        """The result of a request; ``None`` for a collection that is not there."""
        _, _, name, *rest = [unquote(part) for part in path.split("/")]
        with self._lock:
            if (method, rest) == ("PUT", []):
                return self._create(name, body)
            if rest == ["exists"]:
                return {"exists": name in self._collections}
            if name not in self._collections:
                return None
            return self._of_collection(method, rest, name, body)

    def _create(self, name: str, body: dict[str, Any]) -> bool:
        vectors = body["vectors"]
        assert vectors["distance"] == "Dot"
        graph = edge.HnswIndexConfig(m=vectors["hnsw_config"]["m"], ef_construct=64, full_scan_threshold=10)
        params = edge.EdgeVectorParams(size=vectors["size"], distance=edge.Distance.Dot, hnsw_config=graph)
        folder = self._folder / f"{len(list(self._folder.iterdir()))}"
        folder.mkdir()
        shard = edge.EdgeShard.create(str(folder), edge.EdgeConfig(vectors=params, wal_enabled=False))
        self._collections[name] = (shard, body)
        return True

    def _of_collection(self, method: str, rest: list[str], name: str, body: dict[str, Any]) -> Any:
        shard, made = self._collections[name]
        if (method, rest) == ("GET", []):
            return _description(made, shard)
        if (method, rest) == ("DELETE", []):
            del self._collections[name]
            return True
        if (method, rest) == ("PATCH", []):
            made["metadata"] = {**made.get("metadata", {}), **body["metadata"]}
            return True
        if rest == ["points", "count"]:
            return {"count": shard.count(edge.CountRequest(exact=True))}
        if rest == ["points", "delete"]:
            shard.update(edge.UpdateOperation.delete_points(body["points"]))
        elif rest == ["points", "query", "batch"]:
            queries = [_query(one) for one in body["searches"]]
            answers = shard.query_batch(edge.QueryBatchRequest(queries))
            return [
                {"points": [{**_point(one), "score": one.score, "version": 0} for one in found]}
                for found in answers
            ]
        elif (method, rest) == ("POST", ["points"]):
            return [_point(one) for one in shard.retrieve(body["ids"], with_payload=True, with_vector=True)]
        elif (method, rest) == ("PUT", ["points"]):
            batch = body["batch"]
            rows = zip(batch["ids"], batch["vectors"], map(_marked, batch["payloads"]), strict=True)
            shard.update(edge.UpdateOperation.upsert_points([edge.Point(*row) for row in rows]))
        else:
            raise AssertionError(f"{method} {rest}")
        return {"operation_id": 1, "status": "completed"}


def _description(made: dict[str, Any], shard: edge.EdgeShard) -> dict[str, Any]:
    graph = {"m": 16, "ef_construct": 100, "full_scan_threshold": 10000}
    optimizers = {
        "deleted_threshold": 0.2,
        "vacuum_min_vector_number": 1000,
        "default_segment_number": 0,
        "flush_interval_sec": 5,
    }
    config = {
        "params": {"vectors": made["vectors"]},
        "hnsw_config": graph,
        "optimizer_config": optimizers,
        "metadata": made.get("metadata"),
    }
    return {
        "status": "green",
        "optimizer_status": "ok",
        "segments_count": 1,
        "config": config,
        "payload_schema": {},
    }


def _query(body: dict[str, Any]) -> edge.QueryRequest:
    params = body.get("params") or {}
    return edge.QueryRequest(
        limit=body["limit"],
        query=edge.Query.Nearest(body["query"]["nearest"]),
        with_vector=body["with_vector"],
        with_payload=body["with_payload"],
        filter=None if body.get("filter") is None else _condition(body["filter"]),
        params=edge.SearchParams(hnsw_ef=params.get("hnsw_ef"), exact=params["exact"]),
    )


def _condition(body: dict[str, Any]) -> Any:
    if "is_empty" in body:
        return edge.IsEmptyCondition(body["is_empty"]["key"])
    if "key" not in body:
        clauses = {
            name: [_condition(one) for one in body.get(name) or []] or None
            for name in ("must", "should", "must_not")
        }
        return edge.Filter(**clauses)
    if body.get("range") is not None:
        return edge.FieldCondition(body["key"], range=edge.RangeFloat(**body["range"]))
    match = body["match"]
    found = edge.MatchAny(match["any"]) if "any" in match else edge.MatchValue(_marked(match["value"]))
    return edge.FieldCondition(body["key"], match=found)


def _point(point: Any) -> dict[str, Any]:
    return {"id": point.id, "payload": _unmarked(point.payload), "vector": point.vector}


# The binding for Python takes a truth value in a condition for a number, which the server does not.
_WORDS = {True: "\ue000true", False: "\ue000false"}
_VALUES = {word: value for value, word in _WORDS.items()}


def _marked(value: Any) -> Any:
    """Truth values as words that nothing else uses."""
    if isinstance(value, bool):
        return _WORDS[value]
    if isinstance(value, dict):
        return {name: _marked(item) for name, item in value.items()}
    return [_marked(item) for item in value] if isinstance(value, list) else value


def _unmarked(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _unmarked(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_unmarked(item) for item in value]
    return _VALUES.get(value, value) if isinstance(value, str) else value


def _handler(server: QdrantServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            path = urlsplit(self.path).path
            server.requests.append(path)
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            if server.key and self.headers.get("api-key") != server.key:
                self._send(401, {"status": {"error": f"Invalid API key {self.headers.get('api-key')}"}})
                return
            failing = server.before(path)
            if failing is not None:
                self._send(failing, {"status": {"error": "told to fail"}})
                return
            began = time.perf_counter()
            try:
                result = server.answer(self.command, path, json.loads(body or b"{}"))
            except Exception as error:
                self._send(400, {"status": {"error": str(error)}})
                return
            if result is None:
                self._send(404, {"status": {"error": "Not found: Collection doesn't exist!"}})
                return
            self._send(200, {"result": result, "status": "ok", "time": time.perf_counter() - began})

        def _send(self, status: int, content: dict[str, Any]) -> None:
            written = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(written)))
            self.end_headers()
            self.wfile.write(written)

        do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = _serve  # noqa: N815 - as http.server looks for them

        def log_message(self, format: str, *words: object) -> None:
            pass

    return Handler
