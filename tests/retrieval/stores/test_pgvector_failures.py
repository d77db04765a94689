"""A database that dies, hangs, is slow or full: a clear error in time, and work goes on when it is back."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from specrag.bench.postgres import PostgresServer
from specrag.errors import InputError, SpecragError, StoreUnavailable
from specrag.retrieval.index.base import Ranking
from specrag.retrieval.index.flat import FlatIndex
from specrag.retrieval.stores.base import Limits
from specrag.retrieval.stores.registry import open_store
from specrag.retrieval.stores.retriever import StoreRetriever
from tests.retrieval.stores.tables import (
    collection,
    connected,
    load,
    open_table,
    questions,
    random_vectors,
    same,
    wait_for,
)

VECTORS = random_vectors(200, 8)
QUERIES = questions(random_vectors(3, 8, seed=1))
EXPECTED = FlatIndex.build(VECTORS).search(QUERIES, 4)
BLOCKED = "SELECT pid FROM pg_stat_activity WHERE application_name = 'specrag' AND wait_event_type = 'Lock'"


@pytest.fixture
def server(fragile_postgres: PostgresServer) -> PostgresServer:
    load(fragile_postgres.url, collection(VECTORS), "passages", replace=True)
    return fragile_postgres


@contextmanager
def opened(server: PostgresServer, **limits: float | int) -> Iterator[StoreRetriever]:
    settings = Limits(**limits)  # type: ignore[arg-type]
    with open_table(server.url, "passages", connection=settings) as store:
        yield store


@contextmanager
def search_under_way(server: PostgresServer, store: StoreRetriever) -> Iterator[Future[list[Ranking]]]:
    """A search that waits in the server for a lock, which goes at the end."""
    with (
        ThreadPoolExecutor(1) as pool,
        connected(server.url) as holder,
        contextlib.suppress(psycopg.OperationalError),  # the server may have gone meanwhile
        holder.transaction(),
    ):
        holder.execute("LOCK TABLE passages IN ACCESS EXCLUSIVE MODE")
        running = pool.submit(store.search, QUERIES, 4)
        wait_for(server.url, BLOCKED)
        yield running


def _wait_for_recovery(server: PostgresServer, crashed: int) -> None:
    """Let a crash pass that a search may have outrun, so that the next test does not meet it.

    The server's first process begins to recover when it takes the exit status of the one that crashed.
    """
    end = time.monotonic() + 30
    while Path(f"/proc/{crashed}").exists() or not _accepts(server):
        assert time.monotonic() < end
        time.sleep(0.01)


def _accepts(server: PostgresServer) -> bool:
    try:
        with connected(server.url):
            return True
    except psycopg.OperationalError:
        return False


def _check_message(error: SpecragError, server: PostgresServer) -> None:
    assert "\n" not in str(error)
    assert "table 'passages' at /" in str(error)
    assert server.url.split("host=")[1] in str(error)


def test_a_server_that_stops_in_the_middle_of_a_search(server: PostgresServer) -> None:
    with opened(server, timeout=20, connect_timeout=1) as store:
        assert same(store.search(QUERIES, 4), EXPECTED)
        with search_under_way(server, store) as running:
            began = time.monotonic()
            server.stop("immediate")
            with pytest.raises(
                StoreUnavailable, match=r"cannot be reached .* make sure that it runs"
            ) as error:
                running.result()
            assert time.monotonic() - began < 15
        _check_message(error.value, server)
        with pytest.raises(StoreUnavailable):  # the next search neither hangs nor breaks otherwise
            store.search(QUERIES, 4)
        known = EXPECTED[0].ids
        flat = FlatIndex.build(VECTORS).score(QUERIES, known)
        assert store.score(QUERIES, known).tobytes() == flat.tobytes()  # what it has seen is still there
        with pytest.raises(StoreUnavailable):
            store.passages([id for id in range(200) if id not in store_ids(EXPECTED)][:1])
        server.start()
        assert same(store.search(QUERIES, 4), EXPECTED)


def store_ids(rankings: list[Ranking]) -> set[int]:
    return {id for ranking in rankings for id in ranking.ids.tolist()}


def test_a_server_that_crashes_and_recovers_costs_only_time(server: PostgresServer) -> None:
    with opened(server, timeout=60, connect_timeout=20) as store:
        with search_under_way(server, store) as running:
            crashed = wait_for(server.url, BLOCKED)
            server.signal(crashed, signal.SIGKILL)
            assert same(running.result(), EXPECTED)
        assert same(store.search(QUERIES, 4), EXPECTED)
    _wait_for_recovery(server, crashed)


def test_one_retry_is_enough_for_many_broken_connections(server: PostgresServer) -> None:
    with opened(server, timeout=60, connect_timeout=20, retries=1, connections=4) as store:
        with ThreadPoolExecutor(4) as pool, connected(server.url) as holder:
            with holder.transaction():
                holder.execute("LOCK TABLE passages IN ACCESS EXCLUSIVE MODE")
                running = [pool.submit(store.search, QUERIES, 4) for _ in range(4)]
                wait_for(server.url, f"SELECT count(*) FROM ({BLOCKED}) AS blocked HAVING count(*) = 4")
            assert all(same(search.result(), EXPECTED) for search in running)
        idle = "SELECT pid FROM pg_stat_activity WHERE application_name = 'specrag' AND state = 'idle'"
        crashed = wait_for(server.url, idle)
        server.signal(crashed, signal.SIGKILL)  # and the server ends the others
        assert same(store.search(QUERIES, 4), EXPECTED)
    _wait_for_recovery(server, crashed)


def test_a_server_that_hangs(server: PostgresServer) -> None:
    with opened(server, timeout=1) as store:
        with search_under_way(server, store) as running:
            stuck = wait_for(server.url, BLOCKED)
            server.signal(stuck, signal.SIGSTOP)
            try:
                with pytest.raises(StoreUnavailable, match="did not answer within 1 seconds") as error:
                    running.result()
            finally:
                server.signal(stuck, signal.SIGCONT)
        _check_message(error.value, server)
        assert same(store.search(QUERIES, 4), EXPECTED)


def test_a_statement_that_takes_too_long(server: PostgresServer) -> None:
    with opened(server, timeout=0.5) as store:
        with search_under_way(server, store) as running:
            with pytest.raises(StoreUnavailable, match=r"did not answer within 0\.5 seconds: look what"):
                running.result()
            assert (
                wait_for(server.url, "SELECT count(*) FROM pg_locks WHERE NOT granted HAVING count(*) = 0")
                == 0
            )
        assert same(store.search(QUERIES, 4), EXPECTED)


def test_more_searches_than_connections(server: PostgresServer) -> None:
    with opened(server, connections=1, connect_timeout=0.3) as store:
        with (
            search_under_way(server, store) as running,
            pytest.raises(StoreUnavailable, match=r"all 1 connections were busy for 0\.3 seconds"),
        ):
            store.search(QUERIES, 4)
        assert same(running.result(), EXPECTED)


def test_a_retry_never_begins_after_the_deadline(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    def fail(*words: object) -> None:
        attempts.append(time.monotonic())
        raise psycopg.OperationalError("the connection broke")

    with opened(server, timeout=0.3, retries=50) as store:
        monkeypatch.setattr("specrag.retrieval.stores.pgvector.connection.TimedConnection.pipeline", fail)
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="the connection broke"):
            store.search(QUERIES, 4)
        assert 2 <= len(attempts) < 10
        assert attempts[-1] - began < 0.3


def test_what_cannot_pass_is_not_tried_again(server: PostgresServer) -> None:
    load(server.url, collection(VECTORS), "going", replace=True)
    with open_table(server.url, "going") as store, connected(server.url) as connection:
        connection.execute("ALTER TABLE going RENAME TO gone")
        with pytest.raises(
            SpecragError, match=r"table 'going' at .* does not exist: load a knowledge base into it"
        ):
            store.search(QUERIES, 4)
        connection.execute("ALTER TABLE gone RENAME TO going")
        connection.execute("ALTER TABLE going DROP COLUMN text")
        with pytest.raises(SpecragError, match=r"cannot be used \(column passage\.text does not exist"):
            store.search(QUERIES, 4)
        connection.execute("DROP TABLE going; DELETE FROM specrag_stores WHERE name = 'going'")


def test_a_table_that_was_replaced_is_noticed(server: PostgresServer) -> None:
    with opened(server) as store:
        load(server.url, collection(random_vectors(50, 8, seed=9)), "passages", replace=True)
        with pytest.raises(SpecragError, match="has been replaced since it was opened: open it again"):
            store.search(QUERIES, 4)
        with pytest.raises(SpecragError, match="has been replaced"):
            store.passages([7])


def test_a_row_that_was_deleted_is_named(server: PostgresServer) -> None:
    with opened(server) as store, connected(server.url) as connection:
        connection.execute("DELETE FROM passages WHERE id = 7")
        with pytest.raises(SpecragError, match=r"passage id: 7 .* has no such passage"):
            store.passages([6, 7])


def test_nobody_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # a port on which nobody listens
        port = taken.getsockname()[1]
        url = f"postgresql://reader:pa55word@127.0.0.1:{port}/library"
        with pytest.raises(StoreUnavailable) as error, caplog.at_level(logging.DEBUG):
            open_table(url, "passages")
    assert f"table 'passages' at 127.0.0.1:{port} cannot be reached" in str(error.value)
    assert "refused" in str(error.value)
    chain = [repr(error.value), repr(error.value.__cause__), caplog.text]
    assert not [text for text in chain if "pa55word" in text]


def test_somebody_who_never_answers(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"postgresql://reader@127.0.0.1:{silent.getsockname()[1]}/library"
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"cannot be reached .*timeout"):
            open_table(url, connection=Limits(connect_timeout=1))
        assert time.monotonic() - began < 10


def test_no_password_is_ever_shown(server: PostgresServer, caplog: pytest.LogCaptureFixture) -> None:
    url = server.url.replace("postgres@", "postgres:pa55word@")
    settings = Limits(timeout=5, connect_timeout=1)
    with caplog.at_level(logging.DEBUG), open_table(url, "passages", connection=settings) as store:
        assert same(store.search(QUERIES, 4), EXPECTED)
        server.stop()
        try:
            with pytest.raises(StoreUnavailable) as error:
                store.search(QUERIES, 4)
        finally:
            server.start()
    seen: BaseException | None = error.value
    while seen is not None:
        assert "pa55word" not in repr(seen)
        seen = seen.__cause__ or seen.__context__
    assert "pa55word" not in caplog.text
    assert caplog.text  # the pool did tell of its attempts


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:pa55/word@host/base",
        "postgresql://me:word@pa55@host/base",
        "postgresql://me:55/pa55@host/base",
        "postgresql://me:pa55word@host:port/base",
        "pa55word",
        "",
        " ",
    ],
)
def test_a_url_that_cannot_be_read_is_not_shown(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECRAG_PGVECTOR_URL", raising=False)
    with pytest.raises(InputError, match=r"^pgvector: .* give postgresql://USER@HOST:PORT/DATABASE") as error:
        open_table(url)
    assert "pa55" not in str(error.value)
    assert error.value.__cause__ is None


def test_the_database_may_be_told_in_words(server: PostgresServer) -> None:
    words = f"host={server.url.split('host=')[1]} user=postgres dbname=postgres password='pa55 word'"
    with open_table(words, "passages") as store:
        assert same(store.search(QUERIES, 4), EXPECTED)
    for unclear in ("pa55word", "pa55word#passages"):
        with pytest.raises(InputError) as error:
            open_store(unclear)
        assert "pa55" not in str(error.value)


def test_the_url_may_come_from_the_environment(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECRAG_PGVECTOR_URL", server.url)
    with open_table(None, "passages") as store:
        assert len(store) == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [("timeout", 0), ("timeout", float("nan")), ("connect_timeout", -1), ("retries", -1), ("connections", 0)],
)
def test_settings_that_cannot_be_used(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"^{name}: "):
        Limits(**{name: value})  # type: ignore[arg-type]


def test_a_closed_store_says_so(server: PostgresServer) -> None:
    store = open_table(server.url, "passages")
    store.close()
    store.close()
    with pytest.raises(StoreUnavailable, match="has been closed: open it again"):
        store.search(QUERIES, 4)


def test_nothing_is_left_running(server: PostgresServer) -> None:
    before = set(threading.enumerate())
    with opened(server) as store:
        store.search(QUERIES, 4)
    assert set(threading.enumerate()) == before
    count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'specrag' HAVING count(*) = 0"
    assert wait_for(server.url, count) == 0


def test_the_server_of_the_tests_leaves_nothing() -> None:
    with PostgresServer() as server:
        folder, pid = Path(server.url.split("host=")[1]), server.pid
        assert folder.exists()
    assert not folder.exists()
    assert not _runs(pid)


def test_the_server_of_a_killed_process_leaves_nothing() -> None:
    code = """if True:
        import os, signal
        from specrag.bench.postgres import PostgresServer
        with PostgresServer() as server:
            print(server.url.split("host=")[1], server.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    folder, pid = done.stdout.split()
    assert done.returncode == -signal.SIGKILL
    end = time.monotonic() + 30
    while Path(folder).exists() or _runs(int(pid)):
        assert time.monotonic() < end
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether a process is there and not only its exit status."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text(encoding="utf-8")
