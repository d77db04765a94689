"""A folder of documents, where its knowledge base goes, and a real PostgreSQL for the tests that need one."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from specrag.bench.postgres import PostgresServer
from tests.retrieval.library import write_library


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Give a folder of three documents."""
    return write_library(tmp_path / "library")


@pytest.fixture
def kb(tmp_path: Path) -> Path:
    """Give a knowledge base's folder that is still to be made."""
    return tmp_path / "kb"


def started() -> Iterator[PostgresServer]:
    """Start a server; it is gone afterwards, whatever was done to it."""
    if find_spec("pgserver") is None:
        pytest.skip("pgserver has no wheel for this Python or this machine")
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Give a server that everybody shares: leave it running."""
    yield from started()


@pytest.fixture(scope="module")
def fragile_postgres() -> Iterator[PostgresServer]:
    """Give a server that may be stopped and killed; leave it running."""
    yield from started()
