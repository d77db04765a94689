"""Parameters are checked, truncation agrees with transformers, and draws follow the distribution."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.engine.sampling import Distribution, choose, draw, log_softmax, warp
from specrag.engine.sampling_params import SamplingParams
from specrag.errors import InputError

# --- parameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *itertools.product(["temperature"], [-1, -1e-9, math.nan, math.inf, "hot", None, True, 10**400]),
        *itertools.product(["top_k"], [-1, 1.5, 2.0, "a", True, None]),
        *itertools.product(["top_p"], [0, -0.1, 1.0001, math.nan, "a", False]),
        *itertools.product(["min_p"], [-0.1, 1.1, math.nan, True]),
        *itertools.product(["repetition_penalty"], [0, -1, 1e-30, 101, math.nan, math.inf]),
        *itertools.product(["presence_penalty", "frequency_penalty"], [-2.1, 2.1, math.nan, "a"]),
        *itertools.product(["seed"], [True, 1.5, 1.0, "a", None, math.nan]),
        ("logit_bias", [1]),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: "a"}),
    ],
)
def test_unusable_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_values_at_the_borders_are_taken() -> None:
    params = SamplingParams(
        temperature=1e-300,
        top_k=np.int64(3),  # type: ignore[arg-type]
        top_p=1,
        min_p=1,
        repetition_penalty=np.float32(2),  # type: ignore[arg-type]
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={3: -math.inf, 4: 100, 5: -100},
        seed=-(2**100),
    )
    assert type(params.top_k) is int
    assert type(params.repetition_penalty) is float
    assert params.logit_bias == {3: -math.inf, 4: 100.0, 5: -100.0}
    assert params.seed == -(2**100)


def test_parameters_are_values() -> None:
    given_bias = {3: 1.5}
    params = SamplingParams(temperature=0.5, logit_bias=given_bias, seed=9)
    given_bias[3] = 7.0
    assert params.logit_bias[3] == 1.5
    with pytest.raises(TypeError):
        params.logit_bias[3] = 2.0  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1  # type: ignore[misc]
    for twin in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params), dataclasses.replace(params)):
        assert twin == params
        assert hash(twin) == hash(params)
    assert dataclasses.replace(params, logit_bias={}) != params


def test_greedy() -> None:
    assert SamplingParams().greedy
    assert not SamplingParams(temperature=0.1).greedy


# --- truncation ---------------------------------------------------------------------------------------------


def by_definition(logits: np.ndarray, params: SamplingParams) -> dict[int, float]:
    """Truncation written down naively: one full sort, one loop."""
    order = sorted((i for i in range(len(logits)) if logits[i] > -math.inf), key=lambda i: (-logits[i], i))
    if params.top_k:
        order = order[: params.top_k]
    peak = float(logits[order[0]])
    weight = {i: math.exp((float(logits[i]) - peak) / params.temperature) for i in order}
    kept, mass, total = [], 0.0, math.fsum(weight.values())
    for i in order:
        if mass < params.top_p * total or params.top_p == 1:
            kept.append(i)
        mass += weight[i]
    kept = [i for i in kept if weight[i] >= params.min_p * weight[order[0]]]
    total = math.fsum(weight[i] for i in kept)
    return {i: weight[i] / total for i in sorted(kept)}


@settings(max_examples=300, deadline=None)
@given(
    # Few distinct values: ties everywhere. Multiples of 1/8 keep masses far from top-p's and min-p's borders.
    logits=st.lists(st.one_of(st.integers(-30, 30).map(lambda i: i / 8), st.just(-math.inf)), min_size=1),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.0513, 0.3071, 0.5737, 0.9013, 0.99417, 1.0]),
    min_p=st.sampled_from([0.0, 0.01234, 0.20123, 0.71234]),
)
def test_warp_equals_its_definition(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = np.array(logits, dtype=np.float32)
    if row.max() == -math.inf:
        row[0] = 0.0
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = warp(row, params)
    expected = by_definition(row, params)
    assert got.tokens.tolist() == list(expected)
    assert got.tokens.dtype == np.int64
    assert got.log_probs.dtype == np.float64
    np.testing.assert_allclose(np.exp(got.log_probs), list(expected.values()), rtol=1e-9)
    np.testing.assert_allclose(got.dense(len(row)).sum(), 1.0, rtol=1e-12)


def real_like(seed: int, vocab: int, peaks: int) -> np.ndarray:
    """Logits without ties: a broad floor and, for a language model's confidence, some peaks."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=vocab) * 2.0
    logits[generator.choice(vocab, peaks, replace=False)] += np.linspace(6, 16, peaks)
    return logits.astype(np.float32)


SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 50},
    {"top_k": 1},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.8, "top_k": 300, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.5},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("peaks", [0, 1, 30])
@pytest.mark.parametrize("vocab", [17, 3_000, 49_152])
def test_warp_agrees_with_transformers(setting: dict[str, Any], peaks: int, vocab: int) -> None:
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    params = SamplingParams(**({"temperature": 1.0} | setting))
    logits = real_like(seed=vocab + peaks, vocab=vocab, peaks=min(peaks, vocab))
    # In float64, so that both sides see the same border.
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    scores = process.TemperatureLogitsWarper(params.temperature)(None, scores)
    if params.top_k:
        scores = process.TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = process.TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = process.MinPLogitsWarper(params.min_p)(None, scores)
    expected = scores[0].softmax(-1).numpy()
    got = warp(logits, params)
    assert got.tokens.tolist() == np.flatnonzero(expected).tolist()
    np.testing.assert_allclose(got.dense(vocab), expected, rtol=1e-9, atol=1e-15)


def test_with_ties_transformers_differs_only_among_equals() -> None:
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = np.random.default_rng(0).integers(-4, 5, size=500).astype(np.float32)
    for name, warper, params in [
        ("top-k", process.TopKLogitsWarper(100), SamplingParams(temperature=1, top_k=100)),
        ("top-p", process.TopPLogitsWarper(0.77), SamplingParams(temperature=1, top_p=0.77)),
    ]:
        theirs = warper(None, torch.from_numpy(logits)[None])[0].isfinite().nonzero().ravel().numpy()
        ours = warp(logits, params).tokens
        border = logits[ours].min()
        assert set(ours[logits[ours] > border]) == set(theirs[logits[theirs] > border]), name
        equals = np.flatnonzero(logits == border)
        kept = ours[logits[ours] == border]
        assert kept.tolist() == equals[: len(kept)].tolist(), name
        assert len(kept) < len(equals), name  # else the case shows nothing
        if name == "top-p":
            assert len(theirs) == len(ours)


def test_equal_logits_keep_the_smaller_ids() -> None:
    flat = np.zeros(10_000, dtype=np.float32)
    assert warp(flat, SamplingParams(temperature=1, top_k=3)).tokens.tolist() == [0, 1, 2]
    assert warp(flat, SamplingParams(temperature=1, top_p=0.00025)).tokens.tolist() == [0, 1, 2]
    assert warp(flat, SamplingParams(temperature=1, top_p=0.5)).tokens.tolist() == list(range(5_000))
    assert len(warp(flat, SamplingParams(temperature=1, min_p=1.0)).tokens) == 10_000


def test_temperature_zero_is_one_hot_on_the_smallest_best_id() -> None:
    logits = np.array([1, 5, 5, -math.inf], dtype=np.float32)
    params = SamplingParams(top_k=2, top_p=0.5)
    got = warp(logits, params)
    assert got.tokens.tolist() == [1]
    assert got.log_probs.tolist() == [0.0]
    assert choose(logits, params, position=3) == 1


def test_a_tiny_temperature_is_greedy_in_effect_and_a_huge_one_is_flat() -> None:
    logits = np.array([0.0, 3.0, 2.999, -math.inf], dtype=np.float32)
    for tiny in (1e-6, 1e-308, 5e-324):
        assert warp(logits, SamplingParams(temperature=tiny)).dense(4).tolist() == [0, 1, 0, 0]
        assert {choose(logits, SamplingParams(temperature=tiny), position) for position in range(50)} == {1}
    assert warp(logits, SamplingParams(temperature=1e-308, top_p=0.5)).tokens.tolist() == [1]
    np.testing.assert_allclose(warp(logits, SamplingParams(temperature=1e300)).dense(4), [1 / 3] * 3 + [0])


def test_banned_tokens_are_never_left_and_the_argument_is_not_written_to() -> None:
    logits = np.full(100, -math.inf, dtype=np.float32)
    logits[[7, 90]] = [1, 2]
    before = logits.copy()
    for setting in ({}, {"top_k": 50}, {"top_p": 0.999999}, {"min_p": 1e-9}):
        assert warp(logits, SamplingParams(temperature=1, **setting)).tokens.tolist() == [7, 90]
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [[math.nan, 1.0], [1.0, math.nan], [math.inf, 1.0], [-math.inf] * 2, []])
def test_broken_logits_are_an_error(row: list[float], temperature: float) -> None:
    with pytest.raises(InputError, match="logits"):
        choose(np.array(row, dtype=np.float32), SamplingParams(temperature=temperature), position=0)


# --- drawing ------------------------------------------------------------------------------------------------


def test_draws_follow_the_distribution() -> None:
    logits = np.array([2.0, 1.0, 0.0, -1.0, 0.5], dtype=np.float32)
    params = SamplingParams(temperature=0.9, top_k=4)
    left = warp(logits, params)
    n = 20_000
    counts = np.bincount([draw(left, 5, position) for position in range(n)], minlength=5)
    expected = left.dense(5) * n
    assert counts[3] == 0
    alive = expected > 0
    chi_square = float(((counts[alive] - expected[alive]) ** 2 / expected[alive]).sum())
    assert chi_square < 16.3  # 3 degrees of freedom: exceeded by chance with probability 1e-3


def test_a_draw_is_a_function_of_its_arguments() -> None:
    logits = real_like(1, 1_000, 0)
    params = SamplingParams(temperature=1.0, seed=3)
    first = [choose(logits, params, position) for position in range(50)]
    backwards = [choose(logits, params, position) for position in reversed(range(50))]
    assert first == backwards[::-1]
    assert first == [draw(warp(logits, params), 3, position) for position in range(50)]
    assert first != [choose(logits, dataclasses.replace(params, seed=4), position) for position in range(50)]
    assert len(set(first)) > 20


def test_truncation_that_spares_the_drawn_token_does_not_change_the_draw() -> None:
    logits = real_like(2, 1_000, 20)
    full = SamplingParams(temperature=1.0)
    cut = dataclasses.replace(full, top_k=20)
    survivors = set(warp(logits, cut).tokens.tolist())
    pairs = [(choose(logits, full, i), choose(logits, cut, i)) for i in range(200)]
    assert all(one == other for one, other in pairs if one in survivors)
    assert sum(one in survivors for one, _ in pairs) > 50


def test_equal_scores_draw_the_smaller_id(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(_seed: int, _position: int, tokens: np.ndarray) -> np.ndarray:
        return np.zeros(len(tokens))

    monkeypatch.setattr("specrag.engine.sampling.keyed_gumbel", silent)
    tied = Distribution(np.array([4, 8, 9]), np.log([0.2, 0.4, 0.4]))
    assert draw(tied, 0, 0) == 8


# --- log-probabilities --------------------------------------------------------------------------------------


def test_log_softmax_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    for logits in (real_like(3, 5_000, 10), np.zeros(7, np.float32), np.array([-1e30, 0, 1e30], np.float32)):
        theirs = torch.log_softmax(torch.from_numpy(logits.astype(np.float64)), -1)
        np.testing.assert_allclose(log_softmax(logits), theirs.numpy(), rtol=1e-12, atol=1e-12)


def test_log_softmax_of_banned_tokens() -> None:
    banned = np.array([0.0, -math.inf, 0.0], dtype=np.float32)
    assert log_softmax(banned).tolist() == pytest.approx([-math.log(2), -math.inf, -math.log(2)])
