"""Fixtures that every test may ask for: the models' home, the default small model, the measuring data."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from specrag import LanguageModel


# The first example of a test may compile a loop.
hypothesis.settings.register_profile("specrag", deadline=None)
hypothesis.settings.load_profile("specrag")


# A background job of a shell is born deaf to interrupts, and so are the programs that it starts; tests interrupt some.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The default is the best model that the machine carries, gigabytes of it; here, and in what tests start, the small one.
os.environ.setdefault("SPECRAG_MODEL", "smollm2-135m")


# What `--fast` leaves out: tests that ask for a model, folders whose tests start servers, train, or run whole pages,
# and files that load models or kill processes throughout. Single tests are marked `slow`.
_MODELS = frozenset({"smollm2", "llm"})
_LONG = frozenset(
    {
        *("serving", "training", "docs", "bench", "benchmarks", "recipes", "integrations", "stores"),
        *("test_greedy_oracle", "test_language_model", "test_long_context", "test_knn_lm", "test_encoder"),
        *(
            "test_kill",
            "test_power_loss",
            "test_pulling",
            "test_updates",
            "test_knn_datastore",
            "test_knn_search",
        ),
        *("test_catalog", "test_chunking"),
    }
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="only tests that need no model, no server and no training"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what `--fast` leaves out."""
    return True if collection_path.stem in _LONG and config.getoption("--fast") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--fast` does not run."""
    if not config.getoption("--fast"):
        return

    def long(item: pytest.Item) -> bool:
        asked = getattr(item, "fixturenames", ())
        return item.get_closest_marker("slow") is not None or not _MODELS.isdisjoint(asked)

    config.hook.pytest_deselected(items=[item for item in items if long(item)])
    items[:] = [item for item in items if not long(item)]


_MEASURING_DATA = os.environ.get("SPECRAG_DATA", "")


@pytest.fixture(scope="session", autouse=True)
def model_home() -> Iterator[Path]:
    """Set SPECRAG_HOME for the whole run to a folder that outlives it, so that a model is fetched once.

    SPECRAG_DATA is not set meanwhile: every bench that a test runs would measure with it.
    """
    home = Path(os.environ.get("SPECRAG_TEST_HOME", Path.home() / ".cache" / "specrag-tests"))
    home.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRAG_HOME", str(home))
        patch.delenv("SPECRAG_DATA", raising=False)
        yield home


@pytest.fixture(scope="session")
def smollm2(model_home: Path) -> Path:
    """Give the folder with SmolLM2-135M-Instruct; fetched on first use (93 MB)."""
    from specrag.models import catalog  # here, so that tests without a model do not wait for its imports

    return catalog.resolve("smollm2-135m").folder


@pytest.fixture(scope="session")
def llm(smollm2: Path) -> Iterator[LanguageModel]:
    """Give SmolLM2-135M-Instruct in bf16, ready to generate; shared, so leave it as it was.

    The default method's schedule follows the clock, so that passes differ from run to run: a row's bits must not depend
    on what else is in its pass.
    """
    import specrag

    llm = specrag.load("smollm2-135m", device="cpu", batch_invariant=True)
    yield llm
    llm.close()


@pytest.fixture(scope="session")
def exact_llm(smollm2: Path) -> Iterator[LanguageModel]:
    """Give the same model in fp32, where texts and scores are those of any other batch; leave it as it was."""
    import specrag

    llm = specrag.load("smollm2-135m", dtype="fp32", device="cpu")
    yield llm
    llm.close()


@pytest.fixture(scope="session")
def measuring_data() -> Path:
    """Give the folder of measuring data that ``$SPECRAG_DATA`` names; for tests of its loaders only."""
    if not _MEASURING_DATA:
        pytest.skip("SPECRAG_DATA names no folder of measuring data")
    return Path(_MEASURING_DATA)
