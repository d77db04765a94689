"""A server with a real model and a small knowledge base, shared by all tests of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sample import build_sample
from tests.serving.live_server import LiveServer, running_server


@pytest.fixture(scope="session")
def sample_base(model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a knowledge base of 24 summaries; leave it as it was."""
    return build_sample(tmp_path_factory.mktemp("served") / "kb")


@pytest.fixture(scope="session")
def server(smollm2: Path, sample_base: Path) -> Iterator[LiveServer]:
    """Give a server; shared, so leave it idle."""
    with running_server(kbs={"wiki": sample_base}, max_concurrent=16) as server:
        yield server
