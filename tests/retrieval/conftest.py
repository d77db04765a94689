"""A real PostgreSQL for the tests that need one."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from specrag.bench.postgres import PostgresServer


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
