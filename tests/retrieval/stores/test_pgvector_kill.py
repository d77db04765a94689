"""Loads that are killed, interrupted or meet each other: a table is as before or as after."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from specrag.bench.postgres import PostgresServer
from specrag.errors import SpecragError
from specrag.retrieval.index.flat import FlatIndex
from specrag.retrieval.manifest import KnowledgeBaseError
from specrag.retrieval.progress import Progress
from tests.retrieval.stores.tables import (
    collection,
    connected,
    leftovers,
    load,
    open_table,
    questions,
    random_vectors,
    same,
    wait_for,
)

VECTORS = random_vectors(30, 6)
ROOT = Path(__file__).resolve().parents[3]

DRIVER = """
import os, sys
from specrag.retrieval.index.hnsw import HnswSettings
from tests.retrieval.stores.tables import load, open_table, collection, random_vectors

def tell(progress):
    print(progress.stage, progress.done, flush=True)

graph = HnswSettings(8, 32, 9)
large = collection(random_vectors(4000, 32, seed=7))
print("ready", flush=True)
for _ in sys.stdin:
    child = os.fork()
    if not child:
        print(os.getpid(), flush=True)
        load(sys.argv[1], large, "killed", hnsw=graph, replace=True, progress=tell)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print("ended", status, flush=True)
"""


class Driver:
    """A process that has everything imported, and makes a child for each load."""

    def __init__(self, url: str) -> None:
        words = [sys.executable, "-c", DRIVER, url]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill_load(self, moment: str, delay: float) -> bool:
        """Load in a child, and kill it some seconds behind a moment; whether it was still at work."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        child = int(self._line())
        while (line := self._line()) != moment:
            assert not line.startswith("ended"), line
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)  # if it has ended its number is still its own
        while not (line := self._line()).startswith("ended"):
            pass
        return line == f"ended {int(signal.SIGKILL)}"

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def driver(postgres: PostgresServer) -> Iterator[Driver]:
    driver = Driver(postgres.url)
    yield driver
    driver.close()


@pytest.mark.parametrize("moment", ["loading 0", "loading 2048", "loading 4000", "indexing 0"])
@pytest.mark.parametrize("before", [False, True], ids=["new", "replacing"])
def test_a_load_that_is_killed_leaves_what_was_there(
    moment: str, before: bool, postgres: PostgresServer, driver: Driver
) -> None:
    with connected(postgres.url) as connection:
        connection.execute("DROP TABLE IF EXISTS killed")
        if connection.execute("SELECT to_regclass('specrag_stores')").fetchone() != (None,):
            connection.execute("DELETE FROM specrag_stores WHERE name = 'killed'")
    if before:
        load(postgres.url, collection(VECTORS), "killed")
    assert driver.kill_load(moment, random.uniform(0, 0.02))
    gone = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'specrag' HAVING count(*) = 0"
    wait_for(postgres.url, gone)  # the server notices when it next speaks to the process
    assert leftovers(postgres.url) == 0
    if before:
        with open_table(postgres.url, "killed") as store:
            assert same(
                store.search(questions(VECTORS), 3), FlatIndex.build(VECTORS).search(questions(VECTORS), 3)
            )
    else:
        with pytest.raises(KnowledgeBaseError, match="does not exist"):
            open_table(postgres.url, "killed")
    load(postgres.url, collection(VECTORS), "killed", replace=True)  # and nothing is in the way


def test_an_interrupted_load_leaves_nothing(postgres: PostgresServer) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.stage == "indexing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(postgres.url, collection(VECTORS), "interrupted", progress=interrupt)
    assert leftovers(postgres.url) == 0
    with pytest.raises(KnowledgeBaseError, match="does not exist"):
        open_table(postgres.url, "interrupted")


def test_one_load_at_a_time_and_searches_go_on(postgres: PostgresServer) -> None:
    load(postgres.url, collection(VECTORS), "busy", replace=True)
    reached, go_on = threading.Event(), threading.Event()

    def wait(progress: Progress) -> None:
        if progress.stage == "indexing" and not progress.done:
            reached.set()
            assert go_on.wait(30)

    other = random_vectors(40, 6, seed=3)
    thread = threading.Thread(
        target=load,
        args=(postgres.url, collection(other), "busy"),
        kwargs={"replace": True, "progress": wait},
    )
    thread.start()
    try:
        assert reached.wait(30)
        with pytest.raises(
            KnowledgeBaseError, match="is being loaded by another process: wait until it has ended"
        ):
            load(postgres.url, collection(VECTORS), "busy", replace=True)
        load(postgres.url, collection(VECTORS), "not busy", replace=True)
        with open_table(postgres.url, "busy") as store:
            assert len(store.search(questions(VECTORS[:1]), 3)[0]) == 3
    finally:
        go_on.set()
        thread.join()
    with open_table(postgres.url, "busy") as store:
        assert len(store) == 40


def test_first_loads_at_once(postgres: PostgresServer) -> None:
    with connected(postgres.url) as connection:
        connection.execute("DROP DATABASE IF EXISTS new")
        connection.execute("CREATE DATABASE new")
    url = postgres.url.replace("/postgres?", "/new?")
    failures: list[SpecragError] = []

    def work(number: int) -> None:
        try:
            load(url, collection(VECTORS), f"first{number}")
        except SpecragError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
