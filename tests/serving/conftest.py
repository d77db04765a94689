"""A server with a real model, a small knowledge base and a datastore, shared by all tests of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sample import build_sample, build_village
from tests.serving.live_server import MODEL, LiveServer, running_server


@pytest.fixture(scope="session")
def sample_base(model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a knowledge base of 24 summaries; leave it as it was."""
    return build_sample(tmp_path_factory.mktemp("served") / "kb")


@pytest.fixture(scope="session")
def village(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a datastore of kNN-LM; leave it as it was."""
    folder = tmp_path_factory.mktemp("served") / "store"
    return build_village(folder, MODEL, dtype="int8", batch_invariant=True)


@pytest.fixture(scope="session")
def server(smollm2: Path, sample_base: Path, village: Path) -> Iterator[LiveServer]:
    """Give a server; shared, so leave it idle."""
    with running_server(
        kbs={"wiki": sample_base}, datastores={"village": village}, max_concurrent=16
    ) as server:
        yield server
