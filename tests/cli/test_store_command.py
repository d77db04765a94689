"""Commands over stores and shards: documents into several, found again, marked where one is down."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specrag.cli.main import run
from tests.cli.shell import Result
from tests.retrieval.library import index, open_base, write_library
from tests.retrieval.stores.qdrant_server import QdrantServer

Here = Callable[..., Result]
QUESTION = "Which metal is red?"


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """Run a command line in this process."""
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*words: str) -> Result:
        capsys.readouterr()
        code = run(words)
        said = capsys.readouterr()
        return Result(code, said.out, said.err)

    return call


@pytest.fixture(scope="module")
def servers() -> Iterator[list[QdrantServer]]:
    with QdrantServer() as first, QdrantServer() as second:
        yield [first, second]


@pytest.fixture(scope="module")
def kb(model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("knowledge")
    index(write_library(folder / "library"), kb=folder / "kb")
    return folder / "kb"


def _addresses(servers: list[QdrantServer], name: str) -> str:
    return ",".join(server.address(name) for server in servers)


def _hits(result: Result) -> list[tuple[str, str, float]]:
    assert result.code == 0, result.err
    return [(hit["title"], hit["text"], hit["score"]) for hit in json.loads(result.out)["hits"]]


def test_documents_go_into_shards_and_are_found_there(
    kb: Path, servers: list[QdrantServer], here: Here
) -> None:
    both = _addresses(servers, "library")
    loaded = here("index", "--kb", str(kb), "--store", f"shards:{both}")
    assert loaded.code == 0, loaded.err
    assert f"store:     shards:{both}, " in loaded.out
    with open_base(kb) as base:
        (hits,) = base.search([QUESTION], 4, index="flat")
        expected = [(hit.passage.title, hit.passage.text, hit.score) for hit in hits]
    assert _hits(here("search", QUESTION, "--kb", f"shards:{both}", "-k", "4", "--json")) == expected
    condition = 'not title = "Copper" and title is not null'
    narrowed = _hits(here("search", QUESTION, "--kb", f"shards:{both}", "--where", condition, "--json"))
    assert narrowed
    assert "Copper" not in {title for title, _, _ in narrowed}
    again = here("index", "--kb", str(kb), "--store", f"shards:{both}")
    assert (again.code, again.err.count("\n")) == (1, 1)
    assert "it exists already; replace it" in again.err
    assert here("index", "--kb", str(kb), "--store", f"shards:{both}", "--replace").code == 0


def test_a_shard_that_is_down(kb: Path, servers: list[QdrantServer], here: Here) -> None:
    both = _addresses(servers, "going")
    assert here("index", "--kb", str(kb), "--store", f"shards:{both}").code == 0
    servers[1].stop()
    try:
        strict = here("search", QUESTION, "--kb", f"shards:{both}")
        assert (strict.code, strict.out, strict.err.count("\n")) == (1, "", 1)
        assert "collection 'going' at 127.0.0.1" in strict.err
        partial = here("search", QUESTION, "--kb", f"partial-shards:{both}", "--json")
        assert _hits(partial)
        assert json.loads(partial.out)["missing_shards"] == [servers[1].address("going")]
        shown = here("search", QUESTION, "--kb", f"partial-shards:{both}")
        assert f"partial: {servers[1].address('going')} did not answer" in shown.err
    finally:
        servers[1].start()
    assert (
        json.loads(here("search", QUESTION, "--kb", f"partial-shards:{both}", "--json").out)["missing_shards"]
        == []
    )


@pytest.mark.slow
def test_questions_are_answered_from_shards(kb: Path, servers: list[QdrantServer], here: Here) -> None:
    both = _addresses(servers, "asked")
    assert here("index", "--kb", str(kb), "--store", f"shards:{both}").code == 0
    words = (
        "ask",
        QUESTION,
        "--max-tokens",
        "12",
        "--json",
        "-o",
        "dtype=int8",
        "-o",
        "batch_invariant=true",
    )
    iterative = ("--method", "ralmspec", "-o", "prefetch=2")
    local = here(*words, *iterative, "--kb", str(kb), "-o", "index=flat")
    stored = here(*words, *iterative, "--kb", f"shards:{both}")
    assert (local.code, stored.code) == (0, 0), local.err + stored.err
    assert json.loads(stored.out)["tokens"] == json.loads(local.out)["tokens"]
    assert json.loads(stored.out)["usage"]["missing_shards"] == []
    servers[1].stop()
    try:
        once = here(*words, "--kb", f"partial-shards:{both}", "--where", 'title = "Copper", "Gold"')
        assert once.code == 0, once.err
        assert json.loads(once.out)["usage"]["missing_shards"] == [servers[1].address("asked")]
    finally:
        servers[1].start()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            ("search", "tin", "--kb", "qdrant://:pa55word@127.0.0.1:1/x"),
            ("collection 'x' at 127.0.0.1:1 cannot be",),
        ),
        (("search", "tin", "--kb", "redis://:pa55word@h/x"), ("store: 'redis'", "qdrant, milvus")),
        (("ask", "tin?", "--kb", "shards:"), ("shards", "shards:ADDRESS,ADDRESS")),
        (("search", "tin", "--kb", "qdrant://h/x", "--where", "year >="), ("where", "give a value")),
        (("search", "tin", "--kb", "qdrant://h/x", "--index", "bm25"), ("index: 'bm25'", "flat and hnsw")),
        (("index", ".", "--kb", "kb", "--store", "qdrant://:pa55word@127.0.0.1:1/x"), ("cannot be reached",)),
        (("index", ".", "--kb", "kb", "--store", "shards:folder"), ("store: 'folder'", "address of a store")),
        (("index", ".", "--kb", "kb", "--store", "qdrant://h/x", "--table", "x"), ("--store", "not both")),
    ],
    ids=str,
)
def test_what_cannot_be_is_said_in_a_line(
    words: tuple[str, ...],
    named: tuple[str, ...],
    here: Here,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = here(*words)
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1), result.err
    assert [part for part in named if part not in result.err] == [], result.err
    assert "pa55word" not in result.err
    assert not (tmp_path / "kb").exists()
