"""Homes for tests that make, break or remove models, and numbers of threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specrag.models import catalog
from specrag.models.catalog import ModelFiles
from tests.models import tiny


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home."""
    home = tmp_path / "home"
    monkeypatch.setenv("SPECRAG_HOME", str(home))
    return home


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a GGUF file."""
    return tiny.write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model cut into four wheels."""
    folder = tmp_path_factory.mktemp("wheels")
    tiny.write_wheels(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_files(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """The tiny model, converted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRAG_HOME", str(tmp_path_factory.mktemp("home")))
        return catalog.resolve(tiny_gguf)


@pytest.fixture(scope="session")
def smollm2_files(model_home: Path) -> ModelFiles:
    """SmolLM2-135M-Instruct."""
    return catalog.resolve("smollm2-135m")


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Give the number of torch's threads, each in turn; leave it as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
