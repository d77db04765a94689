"""``specrag index`` and ``specrag search`` with a table of PostgreSQL, mostly in this process: that saves imports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specrag.bench.postgres import PostgresServer
from specrag.cli.main import run
from tests.cli.shell import Result, specrag
from tests.retrieval.conftest import started
from tests.retrieval.library import index, open_base, write_library

Here = Callable[..., Result]


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """Run a command line in this process."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("SPECRAG_PGVECTOR_URL", raising=False)

    def call(*words: str) -> Result:
        capsys.readouterr()
        code = run(words)
        said = capsys.readouterr()
        return Result(code, said.out, said.err)

    return call


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    yield from started()


@pytest.fixture(scope="module")
def kb(server: PostgresServer, model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a knowledge base that is also in the table ``metals``, with an HNSW index."""
    folder = tmp_path_factory.mktemp("knowledge")
    index(write_library(folder / "library"), kb=folder / "kb")
    words = ("index", "--kb", str(folder / "kb"), "--table", "metals", "--hnsw", "--json")
    made = specrag(*words, SPECRAG_PGVECTOR_URL=server.url)
    assert made.code == 0, made.err
    described = json.loads(made.out)
    assert described["kb"] == str(folder / "kb")
    assert described["table"]["name"] == "metals"
    assert described["table"]["passages"] > 5
    return folder / "kb"


def _hits(result: Result) -> list[tuple[str, str, float]]:
    assert result.code == 0, result.err
    return [(hit["title"], hit["text"], hit["score"]) for hit in json.loads(result.out)["hits"]]


@pytest.mark.parametrize("name", ["flat", "hnsw"])
def test_a_table_gives_the_hits_of_the_folder(
    name: str, kb: Path, server: PostgresServer, here: Here
) -> None:
    found = here(
        *(
            "search",
            "Which metal is red?",
            "--index",
            name,
            "-k",
            "3",
            "--where",
            "title=Copper,Gold",
            "--json",
        ),
        *("--pgvector", server.url, "--table", "metals"),
    )
    with open_base(kb) as base:
        (hits,) = base.search(["Which metal is red?"], 3, index="flat", where={"title": ["Copper", "Gold"]})
        assert _hits(found) == [(hit.passage.title, hit.passage.text, hit.score) for hit in hits]
        assert json.loads(found.out)["passages"] == len(base)
    assert json.loads(found.out)["index"] == name


def test_more_hits_than_a_walk_usually_keeps(kb: Path, server: PostgresServer, here: Here) -> None:
    with open_base(kb) as base:
        count = str(len(base))
    words = ("search", "metal", "--pgvector", server.url, "--table", "metals", "--index", "hnsw", "-k", count)
    assert len(_hits(here(*words, "--json"))) == int(count)


def test_search_names_the_index_and_the_time(kb: Path, server: PostgresServer) -> None:
    result = specrag("search", "gold", "--table", "metals", SPECRAG_PGVECTOR_URL=server.url)
    assert result.code == 0, result.err
    assert "Gold" in result.out.splitlines()[0]
    assert result.err.startswith("5 of ")
    assert " passages, flat: search " in result.err


def test_documents_go_into_both(server: PostgresServer, model_home: Path, tmp_path: Path, here: Here) -> None:
    (tmp_path / "tin.txt").write_text("Tin is soft.", encoding="utf-8")
    words = ("index", str(tmp_path / "tin.txt"), "--kb", str(tmp_path / "kb"), "--pgvector", server.url)
    made = here(*words)
    assert made.code == 0, made.err
    assert made.err == ""
    assert "documents: 1 added" in made.out
    assert "table:     passages, 1 passages in " in made.out
    _assert_one_line(here(*words), 1, ("table", "'passages'", "exists already; replace it"))
    (tmp_path / "tin.txt").write_text("Tin melts easily.", encoding="utf-8")
    replaced = here(*words, "--replace")
    assert replaced.code == 0, replaced.err
    found = here("search", "tin", "--pgvector", server.url, "--json")
    assert [text for _, text, _ in _hits(found)] == ["Tin melts easily."]


@pytest.mark.slow
def test_a_question_is_answered_from_a_table(kb: Path, server: PostgresServer, here: Here) -> None:
    words = ("ask", "Which metal is red?", "--method", "ralmspec", "--max-tokens", "12", "--json")
    own = ("dtype=int8", "batch_invariant=true", "prefetch=2", "stride=cost-aware")
    sampled = ("--temperature", "0.9", *(word for one in own for word in ("-o", one)))
    table = here(*words, *sampled, "--kb", f"{server.url}#metals")
    folder = here(*words, *sampled, "--kb", str(kb), "-o", "index=flat")
    assert (table.code, folder.code) == (0, 0), table.err + folder.err
    found, wanted = json.loads(table.out), json.loads(folder.out)
    assert found["tokens"] == wanted["tokens"]
    assert [source["title"] for source in found["sources"]] == [
        source["title"] for source in wanted["sources"]
    ]


def _assert_one_line(result: Result, code: int, named: tuple[str, ...]) -> None:
    assert result.code == code, result.err
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert [part for part in named if part not in result.err] == [], result.err


NOWHERE = "postgresql://me:pa55word@127.0.0.1:1/base"


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (("search", "tin", "--pgvector", NOWHERE), 1, ("table 'passages' at 127.0.0.1:1", "make sure that")),
        (
            ("search", "tin", "--pgvector", NOWHERE, "--debug", "--index", "bm25"),
            1,
            ("index: 'bm25'", "flat and hnsw"),
        ),
        (("search", "tin", "--pgvector", "pa55word"), 1, ("pgvector", "postgresql://USER@HOST")),
        (("search", "tin", "--table", "x"), 1, ("pgvector", "SPECRAG_PGVECTOR_URL")),
        (("search", "tin", "--table", "x", "--kb", "kb"), 1, ("--kb: 'kb'", "not both")),
        (("search", "tin"), 2, ("--kb", "--table")),
        (("ask", "tin?"), 2, ("--kb", "--context")),
        (("ask", "tin?", "--kb", NOWHERE), 1, ("table 'passages' at 127.0.0.1:1", "make sure that")),
        (
            ("ask", "tin?", "--kb", f"{NOWHERE}#x", "-m", "ralmspec", "-o", "index=bm25"),
            1,
            ("index", "flat and hnsw"),
        ),
        (("ask", "tin?", "--kb", "postgresql://#x"), 1, ("pgvector", "SPECRAG_PGVECTOR_URL")),
        (("index", "--kb", "kb"), 2, ("PATH", "--store")),
        (("index", ".", "--kb", "kb", "--pgvector", NOWHERE), 1, ("table 'passages' at 127.0.0.1:1",)),
        (("index", ".", "--kb", "kb", "--table", "x" * 64), 1, ("table", "at most 63 bytes")),
    ],
    ids=str,
)
def test_what_cannot_be_is_said_in_a_line(
    words: tuple[str, ...],
    code: int,
    named: tuple[str, ...],
    tmp_path: Path,
    here: Here,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = here(*words)
    if "--debug" not in words:
        _assert_one_line(result, code, named)
    assert result.code == code
    assert [part for part in named if part not in result.err] == []
    assert "pa55word" not in result.out + result.err
    assert not (tmp_path / "kb").exists()


def test_a_table_of_another_name(kb: Path, server: PostgresServer, here: Here) -> None:
    result = here("search", "tin", "--table", "metal", "--pgvector", server.url)
    _assert_one_line(result, 1, ("table 'metal' at", "does not exist", "specrag index"))
    result = here("search", "tin", "--table", "metals", "--pgvector", server.url, "--where", "yaer>=2000")
    _assert_one_line(result, 1, ("where", "'yaer'", "did you mean 'year'"))
    result = here("search", "tin", "--table", "metals", "--pgvector", server.url, "-k", "1000")
    _assert_one_line(result, 1, ("k: 1000", "passages; give 1 to"))
