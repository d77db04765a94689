"""The noise is a function of its key, and looks like noise in every direction."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.engine.draws import keyed_gumbel, keyed_uniform

N = 20_000
TOKENS = np.arange(N)

# Fixed keys make these tests deterministic; 4.5 standard deviations would be passed by chance almost always.
MAX_SIGMA = 4.5

# Computed with Python's integers from the description in draws.py, not with the code under test.
FROZEN = [
    [0.4009938619125307, 0.7810969878848443, 0.7038576445273915],
    [0.2940891177780961, 0.12352405912764641, 0.5185811364306617],
    [0.789706146918533, 0.09526813196480932, 0.20332078502154805],
    [0.33857173781091066, 0.38233843737205786, 0.725257739883241],
]


def across_tokens(seed: int, position: int) -> np.ndarray:
    return keyed_uniform(seed, position, TOKENS)


def across_positions(seed: int, token: int) -> np.ndarray:
    return np.array([keyed_uniform(seed, position, np.array([token]))[0] for position in range(N)])


def across_seeds(position: int, token: int) -> np.ndarray:
    return np.array([keyed_uniform(seed, position, np.array([token]))[0] for seed in range(N)])


STREAMS: dict[str, Callable[[], np.ndarray]] = {
    "tokens": lambda: across_tokens(0, 0),
    "tokens, another key": lambda: across_tokens(123, 4567),
    "tokens, a stride of 2**16": lambda: keyed_uniform(0, 0, TOKENS << 16),
    "positions": lambda: across_positions(0, 0),
    "seeds": lambda: across_seeds(0, 0),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_uniform_by_chi_square(stream: str) -> None:
    bins = 100
    counts = np.bincount((STREAMS[stream]() * bins).astype(int), minlength=bins)
    chi_square = float(((counts - N / bins) ** 2 / (N / bins)).sum())
    assert abs(chi_square - (bins - 1)) < MAX_SIGMA * math.sqrt(2 * (bins - 1))


@pytest.mark.parametrize("stream", STREAMS)
def test_uniform_by_kolmogorov_smirnov(stream: str) -> None:
    values = np.sort(STREAMS[stream]())
    steps = np.arange(N + 1) / N
    distance = max(float((values - steps[:-1]).max()), float((steps[1:] - values).max()))
    assert distance < 2.0 / math.sqrt(N)  # exceeded by chance with probability 7e-4


@pytest.mark.parametrize("stream", STREAMS)
def test_neighbours_within_a_stream_are_uncorrelated(stream: str) -> None:
    values = STREAMS[stream]()
    for lag in (1, 2, 3, 16, 64, 4096):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < MAX_SIGMA / math.sqrt(N - lag)


@pytest.mark.parametrize("lag", [1, 2, 64, 2**32, 2**64])
def test_streams_of_neighbouring_keys_are_independent(lag: int) -> None:
    here = across_tokens(7, 11)
    for there in (across_tokens(7 + lag, 11), across_tokens(7, 11 + lag), across_tokens(7 + lag, 11 - lag)):
        assert abs(np.corrcoef(here, there)[0, 1]) < MAX_SIGMA / math.sqrt(N)
        assert not np.isin(here, there).any()  # no shifted copy either
        joint = np.bincount((here * 10).astype(int) * 10 + (there * 10).astype(int), minlength=100)
        chi_square = float(((joint - N / 100) ** 2 / (N / 100)).sum())
        assert abs(chi_square - 99) < MAX_SIGMA * math.sqrt(2 * 99)


def test_every_bit_is_fair() -> None:
    words = (across_tokens(3, 5) * 2.0**52).astype(np.uint64)
    for bit in range(52):
        share = float(((words >> np.uint64(bit)) & np.uint64(1)).mean())
        assert abs(share - 0.5) < MAX_SIGMA * 0.5 / math.sqrt(N), f"bit {bit}"


def test_gumbel_has_its_mean_and_variance() -> None:
    noise = keyed_gumbel(1, 2, TOKENS)
    assert abs(float(noise.mean()) - 0.5772156649) < MAX_SIGMA * math.sqrt(math.pi**2 / 6 / N)
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.1
    np.testing.assert_allclose(noise, -np.log(-np.log(keyed_uniform(1, 2, TOKENS))), rtol=1e-12)


def test_the_values_are_frozen() -> None:
    tokens = np.array([0, 1, 49151])
    got = [
        keyed_uniform(seed, position, tokens).tolist()
        for seed, position in [(0, 0), (42, 7), (-1, 0), (2**80, 10**6)]
    ]
    assert got == FROZEN


@settings(deadline=None)
@given(
    seed=st.integers(),
    position=st.integers(min_value=0, max_value=2**40),
    tokens=st.lists(st.integers(min_value=0, max_value=2**31), max_size=20),
)
def test_random_access_strictly_inside_the_unit_interval(seed: int, position: int, tokens: list[int]) -> None:
    together = keyed_uniform(seed, position, np.array(tokens, dtype=np.int64))
    one_by_one = [float(keyed_uniform(seed, position, np.array([token]))[0]) for token in tokens]
    assert together.tolist() == one_by_one
    assert ((together > 0) & (together < 1)).all()
    assert np.isfinite(keyed_gumbel(seed, position, np.array(tokens, dtype=np.int64))).all()


def test_any_integer_is_a_seed_of_its_own() -> None:
    seeds = [0, 1, -1, 2**63, -(2**63), 2**64, 2**64 + 1, -(2**64), 10**5000]
    values = {float(keyed_uniform(seed, 0, np.array([5]))[0]) for seed in seeds}
    assert len(values) == len(seeds)


def test_seed_and_position_are_not_mixed_up() -> None:
    assert keyed_uniform(1, 2, TOKENS).tolist() != keyed_uniform(2, 1, TOKENS).tolist()
    assert keyed_uniform(1, 0x12, TOKENS).tolist() != keyed_uniform(0x11, 2, TOKENS).tolist()


def test_the_argument_is_left_alone_and_any_shape_and_integer_type_will_do() -> None:
    tokens = np.array([[1, 2], [3, 4]], dtype=np.uint64)
    values = keyed_uniform(0, 0, tokens)
    assert tokens.tolist() == [[1, 2], [3, 4]]
    assert values.shape == (2, 2)
    assert values.ravel().tolist() == keyed_uniform(0, 0, np.array([1, 2, 3, 4], dtype=np.int32)).tolist()
