"""EAGLE-2's drafter: the best tree for its budget, a cache of true features alone, the output of plain decoding."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specrag.engine.executor import run
from specrag.engine.kv import KeyValueCache
from specrag.engine.outputs import Outputs
from specrag.engine.passes import SessionModel, gather
from specrag.engine.sampling_params import SamplingParams
from specrag.engine.session import Session
from specrag.engine.stopping import StopConditions
from specrag.errors import InputError
from specrag.models.toy import ToyModel
from specrag.speculation.decode import Settings
from specrag.speculation.drafters.eagle import EAGLE, Eagle, FeatureModel
from specrag.speculation.tree import ROOT, DraftTree, Round, Verdict
from tests.models.tiny_eagle import VOCAB, HeadCase, make_case
from tests.speculation.guessing import Budgets, decoding, plain_decoding
from tests.speculation.toy_head import Feature, ToyHead, ToyHeadCache

TARGET = ToyModel(vocab_size=6, order=2, scale=2.0, seed=3)
PROMPT = [3, 1, 4, 1, 5, 2, 0, 5, 3]
FEATURES = Outputs(hidden=("final",))


def started(drafter: Eagle, tokens: Sequence[int], target: SessionModel = TARGET) -> Session:
    session = Session(target)
    rows = run(session.extend(tokens, FEATURES))
    run(drafter.start(session, rows))
    return session


def true_rows(tokens: Sequence[int]) -> list[tuple[int, Feature]]:
    """What the head's cache must hold: each token with the target's feature of the one before it."""
    return [(token, TARGET.logits(tokens[: place + 1])) for place, token in enumerate(tokens[1:])]


# -- the tree -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Guess:
    """A path and its probability in nats, the likeliest first when sorted."""

    cost: float
    tokens: tuple[int, ...]


def children(
    rows: Sequence[tuple[int, Feature]], guess: Guess, head: ToyHead, features: dict[tuple[int, ...], Feature]
) -> list[Guess]:
    """Every continuation by one token, computed from the whole sequence."""
    drafted = [(token, features[guess.tokens[:place]]) for place, token in enumerate(guess.tokens)]
    estimate = features[guess.tokens] = head.estimate([*rows, *drafted])
    log_probs = estimate - np.logaddexp.reduce(estimate.astype(np.float64))
    return [Guess(guess.cost - float(log_probs[token]), (*guess.tokens, token)) for token in range(6)]


def best_paths(tokens: Sequence[int], budget: int, depth: int) -> list[Guess]:
    """The likeliest paths of at most ``depth`` tokens among all there are."""
    head, features, found = ToyHead(TARGET), dict[tuple[int, ...], Feature](), list[Guess]()
    level = [Guess(0.0, ())]
    for _ in range(depth):
        level = [child for guess in level for child in children(true_rows(tokens), guess, head, features)]
        found += level
    return heapq.nsmallest(budget, found)


def paper_paths(tokens: Sequence[int], budget: int, depth: int, top_k: int) -> list[Guess]:
    """EAGLE-2, sections 4.1 and 4.2, word for word: expand the best ``top_k`` of a level, then rank all."""
    head, features, found = ToyHead(TARGET), dict[tuple[int, ...], Feature](), list[Guess]()
    level = [Guess(0.0, ())]
    for _ in range(depth):
        below: list[Guess] = []
        for guess in heapq.nsmallest(top_k, level):
            below += heapq.nsmallest(top_k, children(true_rows(tokens), guess, head, features))
        level = below
        found += level
    return heapq.nsmallest(budget, found)


def paths_of(tree: DraftTree) -> dict[tuple[int, ...], int]:
    """Each node's path of tokens."""
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node, token in enumerate(tree.tokens):
        paths[node] = (*paths[tree.parents[node]], token)
    return {path: node for node, path in paths.items() if node != ROOT}


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 20, 60])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_tree_holds_the_likeliest_paths(budget: int, depth: int) -> None:
    for seed in range(6):
        tokens = [random.Random(seed).randrange(6) for _ in range(3 + seed)]
        # So wide that no path is lost on the way.
        drafter = Eagle(ToyHead(TARGET), depth, top_k=60, min_gain=0)
        tree = run(drafter.propose(started(drafter, tokens), budget))
        expected = best_paths(tokens, budget, depth)
        assert paths_of(tree).keys() == {guess.tokens for guess in expected}
        assert set(tree.sources) == {EAGLE}


@pytest.mark.parametrize("budget", [1, 4, 12, 60])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_it_is_the_papers_tree(budget: int, top_k: int) -> None:
    for seed in range(6):
        tokens = [random.Random(seed).randrange(6) for _ in range(3 + seed)]
        drafter = Eagle(ToyHead(TARGET), 5, top_k, min_gain=0)
        tree = run(drafter.propose(started(drafter, tokens), budget))
        assert paths_of(tree).keys() == {guess.tokens for guess in paper_paths(tokens, budget, 5, top_k)}


def test_surer_guesses_have_higher_grades() -> None:
    drafter = Eagle(ToyHead(TARGET), 1, top_k=6)
    tree = run(drafter.propose(started(drafter, PROMPT), 6))
    order = [guess.tokens[0] for guess in best_paths(PROMPT, 6, 1)]
    grades = [tree.grades[tree.tokens.index(token)] for token in order]
    assert grades == sorted(grades, reverse=True)
    assert len(set(grades)) > 2
    # Estimates drift: the same probability means less behind estimates.
    deep = run(Eagle(ToyHead(TARGET), 4, min_gain=0).fork().propose(Session(TARGET, tokens=PROMPT), 9))
    assert len(deep) == 0  # it was told no features
    drafter = Eagle(ToyHead(TARGET), 4, min_gain=0)
    deep = run(drafter.propose(started(drafter, PROMPT), 40))
    depths = {path: len(path) for path in paths_of(deep)}
    by_depth = {
        depth: {deep.grades[node] for path, node in paths_of(deep).items() if depths[path] == depth}
        for depth in (1, 2, 3)
    }
    assert not by_depth[1] & by_depth[2]
    assert not by_depth[2] & by_depth[3]


# -- what a proposal costs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 5, 60])
def test_a_small_budget_pays_for_few_passes(budget: int) -> None:
    for seed in range(10):
        head = ToyHead(TARGET)
        drafter = Eagle(head, min_gain=0)
        session = started(drafter, [random.Random(seed).randrange(6) for _ in range(9)])
        assert (head.passes, head.rows) == (1, 7)
        tree = run(drafter.propose(session, budget))
        assert len(tree) == budget
        passes = head.passes - 1
        assert passes <= min(budget, 5)
        # The first row is the newest true one; then only nodes whose children may find a place are expanded.
        assert head.rows - 7 <= 1 + max(passes - 1, 0) * min(budget - 1, 10)


def test_it_stops_where_another_level_promises_little() -> None:
    deepest = {}
    for gain in (0.0, 0.2, 0.6, 1.0):
        head = ToyHead(TARGET)
        drafter = Eagle(head, top_k=3, min_gain=gain)
        session = started(drafter, PROMPT)
        passes = head.passes
        tree = run(drafter.propose(session, 60))
        deepest[gain] = max(len(path) for path in paths_of(tree))
        assert head.passes - passes == deepest[gain]
    assert deepest[0.0] == 5
    assert deepest[1.0] == 1
    assert sorted(deepest.values(), reverse=True) == list(deepest.values())
    assert len(set(deepest.values())) > 2


def test_requests_share_the_heads_passes() -> None:
    head = ToyHead(TARGET)
    prompts = [[seed, 1, 2, 3] for seed in range(4)]
    wanted = Settings(StopConditions(30), SamplingParams())
    alone = [plain_decoding(TARGET, prompt, max_tokens=30, sampling=SamplingParams()) for prompt in prompts]
    together = run(
        gather([decoding(TARGET, prompt, wanted, Eagle(head, 3), Budgets([8])) for prompt in prompts])
    )
    assert [text.tokens for text in together] == [text.tokens for text in alone]
    rounds = max(len(text.steps) for text in together)
    assert head.passes <= 1 + 3 * rounds  # as for one request


def test_it_accepts_more_than_one_token_a_round() -> None:
    text = run(
        decoding(
            TARGET,
            PROMPT,
            Settings(StopConditions(60), SamplingParams()),
            Eagle(ToyHead(TARGET)),
            Budgets([20]),
        )
    )
    assert len(text.tokens) / len(text.steps) > 2.5


@pytest.mark.parametrize(
    ("depth", "top_k", "min_gain"),
    [(0, 5, 0.1), (True, 5, 0.1), (5, 0, 0.1), (5, 2.5, 0.1), (5, 5, -0.1), (5, 5, math.nan)],
)
def test_wrong_values_are_refused(depth: int, top_k: int, min_gain: float) -> None:
    with pytest.raises(InputError):
        Eagle(ToyHead(TARGET), depth, top_k, min_gain)


# -- what it remembers ----------------------------------------------------------------------------------------


class Request:
    """A session and its drafter, with any part of its proposals accepted and taken back."""

    def __init__(self, target: SessionModel, head: FeatureModel, vocab_size: int) -> None:
        self.drafter = Eagle(head, min_gain=0)
        self.session = Session(target)
        self._vocab_size = vocab_size

    def extend(self, tokens: Sequence[int], told: int = 99) -> None:
        rows = run(self.session.extend(tokens, FEATURES))
        run(self.drafter.start(self.session, rows[max(len(rows) - told, 0) :]))

    def round(self, budget: int, seed: int) -> None:
        rng = random.Random(seed)
        tree = run(self.drafter.propose(self.session, budget)) if budget else DraftTree()
        rows = run(self.session.score(tree, FEATURES))
        path: list[int] = []
        while True:
            nodes = [
                node for node, parent in enumerate(tree.parents) if parent == (path[-1] if path else ROOT)
            ]
            if not nodes or rng.random() < 0.3:
                break
            path.append(rng.choice(nodes))
        bonus = None if path and rng.random() < 0.2 else rng.randrange(self._vocab_size)
        self.session.commit(path, bonus)
        tokens = [tree.tokens[node] for node in path] + ([] if bonus is None else [bonus])
        self.drafter.observe(Round(tree, rows, Verdict(tuple(path), bonus), tuple(tokens), tree))

    def apply(self, operations: Sequence[tuple[str, int, int]]) -> None:
        for name, number, seed in operations:
            if name == "round":
                self.round(number, seed)
            elif name == "truncate":
                length = 1 + seed % len(self.session)
                self.session.truncate(length)
                self.drafter.truncate(length)
            elif name == "fork":
                self.session, self.drafter = self.session.fork(), self.drafter.fork()
            else:
                self.extend(
                    [random.Random(seed + i).randrange(self._vocab_size) for i in range(1 + number % 4)]
                )


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["round", "round", "truncate", "fork", "extend"]),
        st.integers(0, 12),
        st.integers(0, 99),
    ),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), OPERATIONS)
def test_its_cache_holds_true_tokens_with_true_features(
    prompt: list[int], operations: list[tuple[str, int, int]]
) -> None:
    request = Request(TARGET, ToyHead(TARGET), 6)
    request.extend(prompt)
    request.apply(operations)
    run(request.drafter.propose(request.session, 8))
    cache = request.drafter._cache
    assert isinstance(cache, ToyHeadCache)
    expected = true_rows(request.session.tokens)
    assert [token for token, _ in cache.rows] == [token for token, _ in expected]
    for (_, found), (_, right) in zip(cache.rows, expected, strict=True):
        np.testing.assert_array_equal(found, right)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> HeadCase:
    return make_case("qwen2", tmp_path_factory.mktemp("head"))


def keys_and_values(cache: KeyValueCache) -> torch.Tensor:
    """What the cache holds, ``[2, kv_heads, length, head_dim]``, shared extents first."""
    parts = [run.extent.layers[0][:, :, : run.rows] for run in cache.runs]
    if cache.own is not None:
        parts.append(cache.own.layers[0][:, :, : cache.length - cache.base])
    return torch.cat([torch.zeros(2, 4, 0, 8), *parts], dim=2)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12), OPERATIONS)
def test_its_cache_equals_that_of_a_new_one(
    case: HeadCase, prompt: list[int], operations: list[tuple[str, int, int]]
) -> None:
    request, fresh = (Request(case.target, case.head, VOCAB) for _ in range(2))
    request.extend(prompt)
    request.apply(operations)
    fresh.extend(request.session.tokens)
    for each in (request, fresh):
        run(each.drafter.propose(each.session, 12))
        assert each.drafter._cache.length == len(request.session) - 1
    found, right = (keys_and_values(each.drafter._cache) for each in (request, fresh))
    torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


def test_it_begins_with_the_rows_that_it_is_told() -> None:
    request = Request(TARGET, ToyHead(TARGET), 6)
    request.extend(PROMPT, told=3)
    request.round(5, seed=1)
    request.round(5, seed=2)
    run(request.drafter.propose(request.session, 5))
    expected = true_rows(request.session.tokens)[len(PROMPT) - 4 :]
    cache = request.drafter._cache
    assert [token for token, _ in cache.rows] == [token for token, _ in expected]
    for (_, found), (_, right) in zip(cache.rows, expected, strict=True):
        np.testing.assert_array_equal(found, right)
    # Told of nothing, it waits for the next round; what lies before a gap is dropped.
    request.extend([1, 2, 3], told=0)
    before = len(request.session)
    assert len(run(request.drafter.propose(request.session, 5))) == 0
    request.round(5, seed=3)
    run(request.drafter.propose(request.session, 5))
    assert [token for token, _ in cache.rows] == request.session.tokens[before:]


def test_a_proposal_can_be_asked_for_again() -> None:
    head = ToyHead(TARGET)
    drafter = Eagle(head)
    session = started(drafter, PROMPT)
    assert run(drafter.propose(session, 9)) == run(drafter.propose(session, 9))
