"""Modules, and speculation that guesses as much as it can."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from specrag.integrations.transformers import Speculate, speculate
from specrag.methods.retrieval_decoder import RetrievalDecoder
from tests.integrations.small_modules import build


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Let each test draw the same random numbers, whatever ran before it in its process."""
    random.seed(7)


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


@pytest.fixture
def guessing() -> Speculate:
    """Guesses as much as it can in every round, whatever that costs."""
    return speculate(RetrievalDecoder(cost_aware=False))


@pytest.fixture(autouse=True)
def modules_are_left_as_they_were(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in ("llama", "smollm2_module"):
        if name in request.fixturenames:
            module = request.getfixturevalue(name)
            assert module.config._attn_implementation == ("eager" if name == "llama" else "sdpa")
            assert not module.training
