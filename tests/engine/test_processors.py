"""Processors do what their formulas say, and their state follows any path of a tree."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.engine.processors import (
    AllowedTokens,
    Chain,
    LogitsProcessor,
    OutputPath,
    State,
    build_processors,
)
from specrag.engine.sampling import choose
from specrag.engine.sampling_params import SamplingParams
from specrag.errors import InputError

VOCAB = 12

ROW = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32) * 3

tokens = st.integers(0, VOCAB - 1)


class NoRepeat:
    """A processor of a user's own: bans the newest token; its state is that token."""

    def start(self, prompt: Sequence[int]) -> int:
        return prompt[-1] if prompt else -1

    def advance(self, state: int, token: int) -> int:
        return token

    def apply(self, logits: np.ndarray, state: int) -> np.ndarray:
        processed = logits.copy()
        if state >= 0:
            processed[state] = -math.inf
        return processed


def even_after_odd(output: tuple[int, ...]) -> set[int]:
    first = 0 if output and output[-1] % 2 else 1
    return set(range(first, VOCAB, 2)) | {len(output) % VOCAB}


def after(chain: Chain, prompt: Sequence[int], path: Sequence[int]) -> State:
    state = chain.start(prompt)
    for token in path:
        state = chain.advance(state, token)
    return state


def run(chain: Chain, prompt: Sequence[int], path: Sequence[int], row: np.ndarray = ROW) -> np.ndarray:
    return chain.apply(row, after(chain, prompt, path))


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(tokens, max_size=40),
    # A tree as parents: node i hangs from any earlier node (or from the root, 0). Deep ones fold histories.
    tree=st.lists(st.tuples(st.floats(0, 1), tokens), max_size=60),
    chain_like=st.booleans(),
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    presence=st.sampled_from([0.0, 0.6]),
    frequency=st.sampled_from([0.0, -0.3]),
    bias=st.dictionaries(tokens, st.sampled_from([-math.inf, -1.5, 4.0]), max_size=3),
)
def test_every_node_of_a_tree_equals_a_fresh_start(
    prompt: list[int],
    tree: list[tuple[float, int]],
    chain_like: bool,
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
) -> None:
    params = SamplingParams(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
    )
    chain = build_processors(params, [NoRepeat(), AllowedTokens(even_after_odd)])
    states: list[State] = [chain.start(prompt)]
    paths: list[list[int]] = [[]]
    for where, token in tree:
        parent = len(paths) - 1 if chain_like else round(where * (len(paths) - 1))
        states.append(chain.advance(states[parent], token))
        paths.append([*paths[parent], token])
    # Only after all branches have grown: an old state must not have changed.
    for state, path in zip(states, paths, strict=True):
        np.testing.assert_array_equal(chain.apply(ROW, state), expected(params, prompt, path))


def expected(params: SamplingParams, prompt: Sequence[int], path: Sequence[int]) -> np.ndarray:
    """The formulas, token by token, in float32."""
    counts = Counter(path)
    row = np.empty(VOCAB, dtype=np.float32)
    allowed = even_after_odd(tuple(path))
    newest = ([-1, *prompt, *path])[-1]
    for token in range(VOCAB):
        value = np.float32(ROW[token] + np.float32(params.logit_bias.get(token, 0.0)))
        if token in counts or token in prompt:
            factor = np.float32(params.repetition_penalty)
            value = value * factor if value < 0 else value / factor
        if token in counts:
            penalty = params.presence_penalty + params.frequency_penalty * counts[token]
            value = value - np.float32(penalty)
        if token == newest or token not in allowed:
            value = np.float32(-math.inf)
        row[token] = value
    return row


@settings(max_examples=50, deadline=None)
@given(prompt=st.lists(tokens, min_size=1, max_size=50), path=st.lists(tokens, max_size=80))
def test_repetition_penalty_agrees_with_transformers(prompt: list[int], path: list[int]) -> None:
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    theirs = process.RepetitionPenaltyLogitsProcessor(1.7)(
        torch.tensor([prompt + path]), torch.from_numpy(ROW.copy())[None]
    )
    ours = run(build_processors(SamplingParams(repetition_penalty=1.7)), prompt, path)
    np.testing.assert_array_equal(ours, theirs[0].numpy())


def test_presence_and_frequency_count_the_output_and_not_the_prompt() -> None:
    chain = build_processors(SamplingParams(presence_penalty=1.0, frequency_penalty=0.5))
    path = [3] * 40 + [4]
    got = run(chain, [1, 1, 3], path, np.zeros(VOCAB, dtype=np.float32))
    wanted = np.zeros(VOCAB)
    wanted[[3, 4]] = [-1 - 0.5 * 40, -1.5]
    np.testing.assert_array_equal(got, wanted)


def test_a_bias_can_force_and_ban() -> None:
    chain = build_processors(SamplingParams(logit_bias={2: 100, int(np.argmax(ROW)): -math.inf}))
    got = run(chain, [], [])
    assert int(np.argmax(got)) == 2
    assert got[np.argmax(ROW)] == -math.inf


def test_a_bias_outside_of_the_vocabulary_is_an_error() -> None:
    chain = build_processors(SamplingParams(logit_bias={VOCAB: 1.0}))
    with pytest.raises(InputError, match="logit_bias"):
        run(chain, [], [])


def test_without_parameters_nothing_is_done() -> None:
    chain = build_processors(SamplingParams(temperature=1.0, top_k=3))
    assert chain.processors == ()
    assert run(chain, [1, 2], [3]) is ROW


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(presence_penalty=1.0),
        SamplingParams(logit_bias={1: 5.0}),
    ],
    ids=["repetition", "presence", "bias"],
)
def test_the_argument_is_not_written_to_and_the_type_is_kept(params: SamplingParams) -> None:
    row = ROW.copy()
    row.setflags(write=False)
    got = run(build_processors(params), [1], [1], row)
    assert got.dtype == np.float32
    assert not np.array_equal(got, row)


class Doubled(NoRepeat):
    def apply(self, logits: np.ndarray, state: int) -> np.ndarray:
        return logits * 2


def test_the_users_processors_come_last_in_their_order() -> None:
    params = SamplingParams(logit_bias={5: 100.0})
    got = run(build_processors(params, [Doubled(), AllowedTokens(lambda _output: {5})]), [], [])
    assert got[5] == (ROW[5] + np.float32(100)) * 2
    assert choose(got, params, position=0) == 5
    assert np.isneginf(np.delete(got, 5)).all()


def test_allowed_tokens_sees_the_path_and_takes_sets_and_masks() -> None:
    seen: list[tuple[int, ...]] = []

    def allowed(output: tuple[int, ...]) -> np.ndarray:
        seen.append(output)
        mask = np.zeros(VOCAB, dtype=np.bool_)
        mask[[2, 4]] = True
        return mask

    by_mask = run(build_processors(SamplingParams(), [AllowedTokens(allowed)]), [9, 9], [1, 2, 1])
    by_list = run(build_processors(SamplingParams(), [AllowedTokens(lambda _output: [4, 2, 2])]), [], [])
    assert seen == [(1, 2, 1)]
    np.testing.assert_array_equal(by_mask, by_list)
    assert np.flatnonzero(np.isfinite(by_mask)).tolist() == [2, 4]


@pytest.mark.parametrize(
    "allowed", [set(), {VOCAB}, {-1}, np.ones(VOCAB + 1, dtype=np.bool_), np.zeros(VOCAB, dtype=np.bool_)]
)
def test_a_broken_grammar_is_an_error(allowed: set[int] | np.ndarray) -> None:
    with pytest.raises(InputError, match="allowed"):
        run(build_processors(SamplingParams(), [AllowedTokens(lambda _output: allowed)]), [], [])


def test_a_long_path_neither_recurses_nor_copies() -> None:
    state = OutputPath()
    for _ in range(100_000):
        state = OutputPath(state, 1)
    assert len(state.tokens()) == 100_000
    del state  # a recursive release would end the interpreter


def test_a_long_history_stays_small() -> None:
    chain = build_processors(SamplingParams(repetition_penalty=1.5, frequency_penalty=0.01))
    repetition, output = after(chain, [0], [1, 2, 3, 4] * 2_500)
    assert repetition.tokens.tolist() == [0, 1, 2, 3, 4]
    assert len(output.recent) < 32
    assert int(output.counts.sum()) + len(output.recent) == 10_000


def test_the_protocol_is_met() -> None:
    own: LogitsProcessor = NoRepeat()
    nested: LogitsProcessor = Chain((own, Chain(())))
    assert nested.apply(ROW, nested.start([3]))[3] == -math.inf
