"""What several files of methods' tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import specrag
from specrag import LanguageModel


@pytest.fixture(scope="module")
def caching_llm(smollm2: Path) -> Iterator[LanguageModel]:
    """SmolLM2 with a prefix cache."""
    llm = specrag.load("smollm2-135m", device="cpu", batch_invariant=True, prefix_cache_bytes=2**28)
    yield llm
    llm.close()
