"""Speculative kNN-LM with a real model: the tokens of sequential search, in streams and beside cut requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrag import LanguageModel
from specrag.errors import DeadlineExceeded
from specrag.methods.knn_lm.mixture import Mixture
from specrag.methods.knn_lm.store.build import build_datastore
from specrag.methods.knn_lm.store.datastore import Datastore, model_record
from specrag.methods.knn_lm.store.index import GraphSettings
from specrag.request import Options
from tests.methods.knn_toys import knn
from tests.sample import VILLAGE

PROMPTS = ("The library of the village", "The bank was founded", "A schoolteacher")
MIXTURE = Mixture(k=64, weight=0.6, temperature=5.0)


@pytest.fixture(scope="module")
def store(llm: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Datastore]:
    yield from built(llm, tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def exact_store(exact_llm: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Datastore]:
    yield from built(exact_llm, tmp_path_factory.mktemp("store"))


def built(llm: LanguageModel, folder: Path) -> Iterator[Datastore]:
    tokens = np.array(llm.tokenizer.encode(VILLAGE, special=True), dtype=np.int32)
    build_datastore([tokens], folder, llm.model, model_record(llm.loaded), indexes=[GraphSettings()])
    with Datastore.open(folder) as store:
        yield store


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_are_those_of_sequential_search(
    llm: LanguageModel, store: Datastore, temperature: float
) -> None:
    options: Options = {"raw": True, "max_tokens": 12, "temperature": temperature, "seed": 11}
    accepted = 0
    for number, prompt in enumerate(PROMPTS):
        index = ("flat", "hnsw")[number % 2]
        sequential: Options = {**options, "method": knn(store, MIXTURE, index=index, stride="sequential")}
        expected = llm.generate(prompt, **sequential)
        for asynchronous in (False, True):
            method = knn(store, MIXTURE, index=index, stride=5, asynchronous=asynchronous, decoder="plain")
            speculative: Options = {**options, "method": method}
            steps: list[Any] = list(llm.stream(prompt, **speculative))
            tokens = [token.token for step in steps for token in step.tokens]
            assert tokens == [token.token for token in expected.tokens]
            assert "".join(step.text for step in steps) == expected.text
            accepted += sum(step.accepted for step in steps)
    assert accepted > 20


@pytest.mark.parametrize(
    ("temperature", "index", "prompt"), [(0.0, "flat", PROMPTS[0]), (0.9, "hnsw", PROMPTS[1])]
)
def test_several_tokens_a_pass_are_those_of_one(
    exact_llm: LanguageModel, exact_store: Datastore, temperature: float, index: str, prompt: str
) -> None:
    options: Options = {"raw": True, "max_tokens": 16, "temperature": temperature, "seed": 11}
    sequential: Options = {**options, "method": knn(exact_store, MIXTURE, index=index, stride="sequential")}
    expected = exact_llm.generate(prompt, **sequential)
    for decoder, asynchronous in (("respec", False), ("prompt-lookup", True)):
        method = knn(exact_store, MIXTURE, index=index, stride=4, decoder=decoder, asynchronous=asynchronous)
        speculative: Options = {**options, "method": method}
        found = exact_llm.generate(prompt, **speculative)
        assert [token.token for token in found.tokens] == [token.token for token in expected.tokens]


def test_requests_that_are_cut_leave_the_others_alone(llm: LanguageModel, store: Datastore) -> None:
    method = knn(store, MIXTURE, stride=4, asynchronous=True, decoder="plain")
    options: Options = {"raw": True, "method": method, "max_tokens": 12}
    expected = llm.generate(PROMPTS[0], **options)
    for _ in llm.stream(PROMPTS[1], **options):
        break
    endless: Options = {**options, "max_tokens": 2000, "ignore_eos": True, "timeout": 0.15}
    with pytest.raises(DeadlineExceeded):
        llm.generate(PROMPTS[2], **endless)
    assert llm.generate(PROMPTS[0], **options).text == expected.text
