"""The tiny model, ready to generate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specrag.language_model import LanguageModel, load
from specrag.models import catalog
from specrag.training.eagle.run import Outcome
from specrag.training.eagle.train import train_eagle
from tests.models import tiny
from tests.training.tiny_run import tiny_run, write_texts


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model."""
    gguf = tiny.write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRAG_HOME", str(tmp_path_factory.mktemp("home")))
        return catalog.resolve(gguf).folder


@pytest.fixture(scope="session")
def tiny_llm(tiny_model: Path) -> Iterator[LanguageModel]:
    """The tiny model in fp32; shared, so leave it as it was."""
    llm = load(tiny_model, dtype="fp32", device="cpu")
    yield llm
    llm.close()


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts to make prompts of."""
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="session")
def done(tiny_llm: LanguageModel, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run that nothing disturbed; shared, so leave it as it was."""
    run = tiny_run(
        texts, tmp_path_factory.mktemp("done") / "head", measure=2, command="specrag train eagle ..."
    )
    return train_eagle(tiny_llm, run)
