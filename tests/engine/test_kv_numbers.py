"""Keys and values in 8 bits: how far a number moves, what they weigh, and what it does to a model's distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from specrag.engine.attention.plan import AttentionPlan
from specrag.engine.executor import run
from specrag.engine.kv import SCALE_BYTES, Extent, KeyValueCache, KeyValueShape, dequantize, quantize
from specrag.engine.memory import keys_values_bytes
from specrag.engine.outputs import LOGITS, NOTHING
from specrag.engine.passes import Segment
from specrag.engine.session import Session
from specrag.errors import InputError
from specrag.models.loading import LoadedModel, load_model
from specrag.speculation.tree import EMPTY

ROWS = arrays.arrays(np.float32, (3, 2, 8), elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False))


@given(ROWS)
def test_a_number_moves_by_at_most_half_a_scale(rows: np.ndarray) -> None:
    numbers = torch.from_numpy(rows)
    stored = quantize(numbers)
    assert stored.dtype == torch.int8
    assert stored.shape == (3, 2, 8 + SCALE_BYTES)
    half = numbers.abs().amax(dim=-1, keepdim=True) / 254
    assert ((dequantize(stored, torch.float32) - numbers).abs() <= half * 1.0001).all()


def test_zero_bytes_are_zeros_and_zeros_are_zero_bytes() -> None:
    assert not dequantize(torch.zeros(2, 12, dtype=torch.int8), torch.bfloat16).any()
    assert not quantize(torch.zeros(2, 8)).any()


def shape_of(head_dim: int, int8: bool, dtype: torch.dtype = torch.bfloat16) -> KeyValueShape:
    return KeyValueShape(2, 3, head_dim, dtype, torch.device("cpu"), int8)


def test_what_a_token_weighs() -> None:
    assert shape_of(64, int8=True).bytes_per_token == 2 * 2 * 3 * (64 + 4)
    assert shape_of(64, int8=False).bytes_per_token == 2 * 2 * 3 * 64 * 2
    extent = Extent(shape_of(64, int8=True), 100)
    assert extent.nbytes == sum(buffer.nbytes for buffer in extent.layers)


def test_heads_that_leave_no_aligned_place_for_the_scale() -> None:
    with pytest.raises(InputError, match="heads have 6 numbers"):
        shape_of(6, int8=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_written_is_read(dtype: torch.dtype) -> None:
    """By the compiled loop in bfloat16, by torch's operations in float32; behind rows that stay as they are."""
    shape = shape_of(64, int8=True, dtype=dtype)
    cache = KeyValueCache(shape)
    generator = torch.Generator().manual_seed(0)
    written = []
    for rows in (5, 1, 30):
        plan = AttentionPlan([Segment(cache, [0] * rows, None, [NOTHING] * rows)], 1)
        keys, values = torch.randn(2, rows, 3, 64, generator=generator).to(dtype)
        for layer in range(2):
            plan.write(layer, keys, -values)
        cache.accept(range(rows))
        written.append(torch.stack([keys, -values]).transpose(1, 2).float())
    expected = torch.cat(written, dim=2)
    assert cache.own is not None
    for layer in range(2):
        found = dequantize(cache.own.layers[layer][:, :, :36], torch.float32)
        half = expected.abs().amax(dim=-1, keepdim=True) / 254
        assert ((found - expected).abs() <= half * 1.01).all()
        assert not cache.own.layers[layer][:, :, 36:].any()


@pytest.fixture(scope="module")
def pair(smollm2: object) -> tuple[LoadedModel, LoadedModel]:
    return (
        load_model("smollm2-135m", dtype="bf16", device="cpu"),
        load_model("smollm2-135m", dtype="bf16", device="cpu", kv_dtype="int8"),
    )


TEXT = (
    "Copper is a chemical element with the symbol Cu and the atomic number 29. It is a soft, malleable and ductile "
    "metal with very high thermal and electrical conductivity. A freshly exposed surface of pure copper has a "
    "pinkish-orange colour. "
)


def test_a_models_distribution_hardly_moves(pair: tuple[LoadedModel, LoadedModel]) -> None:
    plain, kept = pair
    tokens = plain.tokenizer.encode(TEXT * 4, special=False)
    laws = []
    for loaded in pair:
        rows = run(Session(loaded.model).extend(tokens, LOGITS))
        logits = torch.from_numpy(np.stack([row.logits for row in rows if row.logits is not None]))
        laws.append(torch.log_softmax(logits.double(), dim=-1))
    divergence = (laws[0].exp() * (laws[0] - laws[1])).sum(dim=-1)
    assert divergence.mean() < 0.01
    assert not torch.equal(laws[0], laws[1])
    assert keys_values_bytes(kept.model, 1000) < 0.54 * keys_values_bytes(plain.model, 1000)


def test_forks_and_trees_read_what_one_session_reads(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """Shared extents and the prompt's own pass, through every way that attention is computed."""
    kept = pair[1]
    tokens = kept.tokenizer.encode(TEXT * 12, special=False)[:600]
    whole = Session(kept.model)
    run(whole.extend(tokens))
    parent = Session(kept.model)
    run(parent.extend(tokens[:500]))
    child = parent.fork(450)
    run(child.extend(tokens[450:], chunk=40))
    wrong = Session(kept.model)
    run(wrong.extend([*tokens[:450], *tokens[451:]]))
    logits = [run(session.score(EMPTY, LOGITS))[0].logits for session in (whole, child, wrong)]
    read, forked, other = (row for row in logits if row is not None)
    # The largest of 49,152 differences is another on every processor; their mean is not.
    assert np.sqrt(np.mean((read - forked) ** 2)) < 0.4
    assert np.sqrt(np.mean((read - other) ** 2)) > 0.8  # one token less, for comparison
    assert int(read.argmax()) == int(forked.argmax())


def test_an_unknown_type() -> None:
    with pytest.raises(InputError, match="kv_dtype: 'int4' is not usable: take one of auto, int8"):
        load_model("smollm2-135m", kv_dtype="int4")
