"""The target's view of a scored tree: against the toy's own table, node by node, from scratch."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.engine.executor import run
from specrag.engine.outputs import NOTHING, Outputs
from specrag.engine.processors import AllowedTokens, LogitsProcessor, build_processors
from specrag.engine.sampling import choose, warp
from specrag.engine.sampling_params import SamplingParams
from specrag.engine.session import Session
from specrag.models.toy import ToyModel
from specrag.speculation.acceptance import RowNeeds
from specrag.speculation.target import Target, TargetView
from specrag.speculation.tree import EMPTY, ROOT, DraftTree
from tests.speculation.guessing import random_tree

VOCAB = 6
PROMPT = [1, 2, 3]
NO_NEEDS = RowNeeds()


def alternating(output: tuple[int, ...]) -> set[int]:
    return {0, 2, 4} if len(output) % 2 else {1, 3, 5}


@dataclass
class Case:
    """A tree behind some output, scored."""

    model: ToyModel
    sampling: SamplingParams
    processors: tuple[LogitsProcessor, ...]
    output: list[int]
    tree: DraftTree
    needs: RowNeeds = NO_NEEDS

    def view(self) -> TargetView:
        """As the loop makes it: a target that was started at the prompt and moved on."""
        session = Session(self.model)
        run(session.extend(PROMPT))
        target = Target(session, self.sampling, None, self.processors, self.needs, NOTHING)
        if self.output:
            run(session.extend(self.output))
            target.advance(self.output)
        return target.view(self.tree, run(session.score(self.tree, target.outputs)))

    def tokens(self, node: int) -> list[int]:
        path: list[int] = []
        while node != ROOT:
            path.insert(0, self.tree.tokens[node])
            node = self.tree.parents[node]
        return [*self.output, *path]

    def logits(self, node: int) -> np.ndarray:
        chain = build_processors(self.sampling, self.processors)
        state = chain.start(PROMPT)
        for token in self.tokens(node):
            state = chain.advance(state, token)
        return chain.apply(self.model.logits([*PROMPT, *self.tokens(node)]), state)

    def position(self, node: int) -> int:
        return len(PROMPT) + len(self.tokens(node))


cases = st.builds(
    lambda seed, nodes, greedy, processed, allowed, output, needs: Case(
        ToyModel(VOCAB, order=2, scale=1.5, seed=seed % 50),
        SamplingParams(
            temperature=0.0 if greedy else 0.8,
            top_k=5,
            top_p=0.9,
            repetition_penalty=1.4 if processed else 1.0,
            frequency_penalty=0.5 if processed else 0.0,
            seed=seed,
        ),
        (AllowedTokens(alternating),) if allowed else (),
        output,
        random_tree(random.Random(seed), nodes, VOCAB),
        needs,
    ),
    st.integers(0, 10**6),
    st.integers(0, 15),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, VOCAB - 1), max_size=5),
    st.sampled_from([RowNeeds(top_k=3), RowNeeds(top_k=50), RowNeeds(top_k=3, logits=True)]),
)


@settings(max_examples=150, deadline=None)
@given(cases, st.randoms(use_true_random=False))
def test_every_answer_is_that_of_a_fresh_start(case: Case, rng: random.Random) -> None:
    """In any order of asking, also of nodes whose parents were never asked about."""
    view = case.view()
    nodes = [*range(ROOT, len(case.tree))] * 2
    rng.shuffle(nodes)
    for node in nodes:
        logits = case.logits(node)
        assert view.draw(node) == choose(logits, case.sampling, case.position(node))
        best = np.argsort(-logits, kind="stable")
        for token in range(VOCAB):
            gap = view.gap(node, token, 3)
            if token in best[:3]:
                assert gap == pytest.approx(float(logits.max()) - float(logits[token]), abs=1e-5)
            else:
                assert gap is None
        if not case.sampling.greedy or case.needs.logits:
            expected = warp(logits, case.sampling).dense(VOCAB)
            assert view.probs(node).dense(VOCAB) == pytest.approx(expected)


def test_the_likeliest_token_has_no_gap_and_ties_go_to_the_smaller_id() -> None:
    model = ToyModel(4, order=1)
    model.table[:] = np.array([1.0, 3.0, 3.0, 3.0])
    for penalty in (0.0, 0.5):  # with and without processors: from the logits and from the top tokens
        sampling = SamplingParams(presence_penalty=penalty)
        view = Case(model, sampling, (), [], EMPTY, RowNeeds(top_k=2)).view()
        assert view.draw(ROOT) == 1
        assert [view.gap(ROOT, token, 2) for token in range(4)] == [None, 0.0, 0.0, None]


def test_a_small_vocabulary_has_fewer_top_tokens_than_asked_for() -> None:
    view = Case(ToyModel(VOCAB), SamplingParams(), (), [], EMPTY, RowNeeds(top_k=50)).view()
    assert all(view.gap(ROOT, token, 50) is not None for token in range(VOCAB))


def test_a_banned_token_is_never_near() -> None:
    sampling = SamplingParams(logit_bias={2: -math.inf})
    view = Case(ToyModel(VOCAB), sampling, (), [], EMPTY, RowNeeds(top_k=VOCAB)).view()
    gap = view.gap(ROOT, 2, VOCAB)
    assert gap is None or gap == math.inf


@pytest.mark.parametrize(
    ("sampling", "log_probs", "needs", "extra", "expected"),
    [
        (SamplingParams(), None, RowNeeds(), NOTHING, Outputs(argmax=True)),
        (SamplingParams(), None, RowNeeds(top_k=5), NOTHING, Outputs(argmax=True, top_k=5)),
        (SamplingParams(), 0, RowNeeds(), NOTHING, Outputs(argmax=True, top_k=1)),
        (SamplingParams(), 7, RowNeeds(top_k=5), NOTHING, Outputs(argmax=True, top_k=7)),
        (SamplingParams(), None, RowNeeds(logits=True), NOTHING, Outputs(argmax=True, logits=True)),
        (SamplingParams(temperature=1), None, RowNeeds(), NOTHING, Outputs(logits=True)),
        (SamplingParams(presence_penalty=1), None, RowNeeds(), NOTHING, Outputs(logits=True)),
        (
            SamplingParams(),
            None,
            RowNeeds(top_k=5),
            Outputs(top_k=8, entropy=True, hidden=("final",), log_probs_of=(3,)),
            Outputs(argmax=True, top_k=8, entropy=True, hidden=("final",), log_probs_of=(3,)),
        ),
    ],
)
def test_rows_return_what_is_read_and_no_more(
    sampling: SamplingParams, log_probs: int | None, needs: RowNeeds, extra: Outputs, expected: Outputs
) -> None:
    session = Session(ToyModel(VOCAB))
    run(session.extend(PROMPT))
    assert Target(session, sampling, log_probs, (), needs, extra).outputs == expected


# --- random numbers ------------------------------------------------------------------------------------------


def view_of(seed: int, tree: DraftTree = EMPTY, prompt: Sequence[int] = PROMPT) -> TargetView:
    model = ToyModel(VOCAB, seed=1)
    session = Session(model)
    run(session.extend(prompt))
    target = Target(session, SamplingParams(temperature=1.0, seed=seed), None, (), RowNeeds(), NOTHING)
    return target.view(tree, run(session.score(tree, target.outputs)))


SEEDS = 2000


def test_numbers_are_keyed_by_seed_and_position_alone() -> None:
    tree = DraftTree((4, 5, 4), (ROOT, ROOT, 0), ("a", "a", "a"))
    other = DraftTree.chain([0, 1], "b")
    even = np.full(VOCAB, 1.0)
    view = view_of(3, tree)
    assert view.uniform(0) == view.uniform(1)  # siblings stand at one position
    assert len({view.uniform(node) for node in (ROOT, 0, 2)}) == 3
    assert [view.uniform(node) for node in (ROOT, 0, 2)] == [
        view_of(3, other).uniform(n) for n in range(-1, 2)
    ]
    # Behind one committed token more, the root stands where its child stood.
    assert view.uniform(0) == view_of(3, prompt=[*PROMPT, 4]).uniform(ROOT)
    assert view.draw_from(0, even) == view_of(3, prompt=[*PROMPT, 4]).draw_from(ROOT, even)
    assert view.uniform(ROOT) != view_of(4).uniform(ROOT)


def test_numbers_are_uniform_and_independent_of_the_draws() -> None:
    """Fixed seeds, so that it passes always or never; the bounds are four standard errors."""
    views = [view_of(seed) for seed in range(SEEDS)]
    numbers = np.array([view.uniform(ROOT) for view in views])
    assert np.all((numbers > 0) & (numbers < 1))
    error = 4 / math.sqrt(SEEDS)
    assert abs(numbers.mean() - 0.5) < error * math.sqrt(1 / 12)
    assert np.abs(np.sort(numbers) - (np.arange(SEEDS) + 0.5) / SEEDS).max() < 1.95 / math.sqrt(SEEDS)
    even = np.full(VOCAB, 1.0)
    drawn = np.array([view.draw(ROOT) for view in views])
    redrawn = np.array([view.draw_from(ROOT, even) for view in views])
    for token in range(VOCAB):
        for one, other in (
            (drawn == token, numbers),
            (redrawn == token, numbers),
            (drawn == token, redrawn == token),
        ):
            assert abs(np.corrcoef(one, other)[0, 1]) < error


def test_a_draw_from_another_distribution_follows_it() -> None:
    """Weights need not sum to 1, and tokens without weight never come."""
    weights = np.array([0.02, 0.0, 0.3, 0.0, 0.08, 0.1])
    counts = np.bincount([view_of(seed).draw_from(ROOT, weights) for seed in range(SEEDS)], minlength=VOCAB)
    expected = weights / weights.sum() * SEEDS
    likely = expected > 0
    assert counts[~likely].sum() == 0
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi_square < 16.3  # three degrees of freedom: exceeded once in a thousand
    assert view_of(1).draw_from(ROOT, np.eye(VOCAB)[3] * 1e-300) == 3
