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
from specrag.models.fused_layers import parts_of
from specrag.speculation.tree import DraftTree

pytestmark = pytest.mark.skipif(not vnni.available(), reason="this processor has no AVX-512 VNNI")

VOCABULARY = 128
#: Of more rows two threads would quantise 2**20 numbers before the widest product: not few.
WIDEST, MOST = 16384, 32
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


@pytest.mark.parametrize("rows", [64, 65, 150, 208])
def test_threads_take_rows_of_their_own(fused: LeanDecoder, single: LeanDecoder, rows: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert len(parts_of(rows)) == 2
        assert same(scored(fused, rows), scored(single, rows))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 408])
def test_every_row_is_one_threads(monkeypatch: pytest.MonkeyPatch, rows: int, threads: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    parts = parts_of(rows)
    assert [row for part in parts for row in range(rows)[part]] == list(range(rows))
    assert all(part.stop - part.start > 0 for part in parts)
    assert all(part.start % 16 == 0 for part in parts)
    assert max(part.stop - part.start for part in parts) <= -(-rows // 16 // threads) * 16 + 16


def test_rows_are_fused_where_that_pays(fused: LeanDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads together for few rows; each for its own if there are enough, and weights are small."""
    assert fused._fused is not None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for small in (True, False):
        monkeypatch.setattr(fused._fused, "_is_small", small)
        for rows, pays in ((1, True), (MOST, True), (MOST + 1, False), (63, False), (64, small)):
            with fused._fused.rows(rows) as made:
                assert (made is not None) is pays


def test_layers_in_other_precisions_are_not_fused() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "intermediate_size": 128})
    weights = AutoModelForCausalLM.from_config(config).state_dict()
    assert LeanDecoder(config, weights, dtype=torch.float32, device=torch.device("cpu"))._fused is None
