"""What several tests of the core are given."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from specrag.engine.executor import Executor
from tests.engine.executor_toys import SOON


@pytest.fixture
def executor() -> Iterator[Executor]:
    """An executor that must be empty when the test is over."""
    executor = Executor()
    yield executor
    executor.close()
    give_up = time.monotonic() + SOON
    while executor._tasks and time.monotonic() < give_up:  # another thread may be about to strike them off
        time.sleep(0.001)
    assert executor._tasks == []
    assert not executor._arrived
