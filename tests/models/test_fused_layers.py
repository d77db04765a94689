"""Layers in one go write the bits of their single operations."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from specrag.engine.cpu import vnni
from specrag.engine.executor import run
from specrag.engine.outputs import Outputs, Row
from specrag.engine.session import Session
from specrag.models.decoder import LeanDecoder
from specrag.speculation.tree import DraftTree

pytestmark = pytest.mark.skipif(not vnni.available(), reason="this processor has no AVX-512 VNNI")

VOCABULARY = 128
#: A pass of more rows has 2**16 numbers in front of its widest product.
WIDEST, MOST = 4096, 15
ASKED = Outputs(logits=True, hidden=("ffn_input", "last", "final"))
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": WIDEST,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


def model_of(config: PretrainedConfig, *, invariant: bool = False) -> LeanDecoder:
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    weights = module.to(torch.bfloat16).state_dict()
    return LeanDecoder(
        config,
        weights,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        int8=True,
        batch_invariant=invariant,
    )


def scored(model: LeanDecoder, rows: int, seed: int = 0) -> list[Row]:
    """The rows of a pass behind forty tokens."""
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, 40 + rows).tolist()
    session = Session(model)
    run(session.extend(tokens[:41]))
    return run(session.score(DraftTree.chain(tokens[41:], "test"), ASKED))


def same(one: list[Row], other: list[Row]) -> bool:
    return len(one) == len(other) and all(
        (np.asarray(mine.logits) == np.asarray(yours.logits)).all()
        and all(torch.equal(mine.hidden[name], yours.hidden[name]) for name in ASKED.hidden)
        for mine, yours in zip(one, other, strict=True)
    )


@pytest.fixture(scope="module")
def fused() -> LeanDecoder:
    return model_of(LlamaConfig(**SIZES))


@pytest.fixture(scope="module")
def single() -> LeanDecoder:
    model = model_of(LlamaConfig(**SIZES))
    model._fused = None
    return model


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, MOST, MOST + 1, 40])
def test_bits_are_those_of_single_operations(fused: LeanDecoder, single: LeanDecoder, rows: int) -> None:
    assert len(scored(fused, rows)) == rows
    assert same(scored(fused, rows), scored(single, rows))


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("invariant", [False, True])
def test_every_family(kind: type[PretrainedConfig], invariant: bool) -> None:
    """With biases, with norms of queries and keys, and with equal bits."""
    one, other = (model_of(kind(**SIZES), invariant=invariant) for _ in range(2))
    assert one._fused is not None
    other._fused = None
    for rows in (1, 5):
        assert same(scored(one, rows), scored(other, rows))


def test_a_result_outlives_the_next_pass(fused: LeanDecoder) -> None:
    """Memory is used again, but not what a pass hands out."""
    first = scored(fused, 4, seed=1)
    kept = [row.hidden["last"].clone() for row in first]
    scored(fused, 4, seed=2)
    assert all(torch.equal(row.hidden["last"], before) for row, before in zip(first, kept, strict=True))


def test_threads_do_not_share_memory(fused: LeanDecoder, single: LeanDecoder) -> None:
    expected = [scored(single, 3, seed) for seed in range(2)]
    together = threading.Barrier(2)

    def passes(seed: int) -> bool:
        together.wait(60)
        return all(same(scored(fused, 3, seed), expected[seed]) for _ in range(60))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(passes, range(2)))


def test_only_few_rows_are_fused(fused: LeanDecoder) -> None:
    assert fused._fused is not None
    for rows, pays in ((1, True), (MOST, True), (MOST + 1, False)):
        with fused._fused.rows(rows) as made:
            assert (made is not None) is pays


def test_layers_in_other_precisions_are_not_fused() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "intermediate_size": 128})
    weights = AutoModelForCausalLM.from_config(config).state_dict()
    assert LeanDecoder(config, weights, dtype=torch.float32, device=torch.device("cpu"))._fused is None
