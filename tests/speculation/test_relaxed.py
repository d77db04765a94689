"""Relaxed verification: against the paper's loop written out, and what is promised of every token."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.engine.executor import run
from specrag.engine.outputs import Outputs, Row
from specrag.engine.processors import build_processors
from specrag.engine.sampling import log_softmax
from specrag.engine.sampling_params import SamplingParams
from specrag.engine.stopping import StopConditions
from specrag.errors import InputError
from specrag.models.toy import ToyModel, _row
from specrag.speculation.acceptance import Matching
from specrag.speculation.decode import TARGET, Settings
from specrag.speculation.relaxed import Accepted, Relaxed, look_ahead
from specrag.speculation.target import TargetView
from specrag.speculation.tree import EMPTY, ROOT, DraftTree, Verdict
from tests.speculation.guessing import Budgets, RandomDrafter, decoding, plain_decoding, random_tree

COPIED = frozenset({"left"})


@dataclass
class TableView:
    """A view from tables: the target's choice behind each node, and the gap of each token there."""

    choices: dict[int, int]
    gaps: dict[tuple[int, int], float | None]
    gaps_asked: list[tuple[int, int, int]] = field(default_factory=list)

    def draw(self, node: int) -> int:
        return self.choices[node]

    def gap(self, node: int, token: int, top_k: int) -> float | None:
        self.gaps_asked.append((node, token, top_k))
        return self.gaps[node, token]


def judge(rule: Relaxed | Matching, tree: DraftTree, view: TableView) -> Verdict:
    return rule.judge(tree, view)  # type: ignore[arg-type]  # it may ask for nothing else


@st.composite
def tables(draw: st.DrawFn) -> tuple[DraftTree, TableView]:
    """A tree of two sources, many of whose nodes match and many of whose others are near."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    likely = [rng.randrange(3) for _ in range(30)]
    tree = random_tree(rng, draw(st.integers(0, 40)), 3, likely)
    gaps: dict[tuple[int, int], float | None] = {}
    choices: dict[int, int] = {}
    for node in range(ROOT, len(tree)):
        children = [tree.tokens[n] for n in range(len(tree)) if tree.parents[n] == node]
        matches = rng.random() < 0.75 and children
        choices[node] = rng.choice(children) if matches else rng.randrange(3)
        for token in range(3):
            gaps[node, token] = rng.choice([0.0, 0.5, 2.0, 3.0, 3.5, None])
        gaps[node, choices[node]] = 0.0
    return tree, TableView(choices, gaps)


# --- the paper's loop, written out ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A place of a candidate: whether it matches, and whether a relaxed check would pass."""

    matches: bool
    near: bool


def papers_loop(places: Sequence[Place], attempts: int, run_length: int) -> tuple[int, list[int]]:
    """Section 3.4, step by step, with no thought of speed: ``last`` and the relaxed places in front of it."""
    agree = [place.matches for place in places] + [False]
    prefix = agree.index(False)
    current, last = prefix, prefix
    attempt = 0
    while attempt < attempts and current < len(places):
        attempt += 1
        if not (places[current].matches or places[current].near):
            break
        xi = agree[current + 1 :].index(False)
        if xi >= run_length:
            last = current + 1 + xi
            current = last
        else:
            current = current + 1
    return last, [i for i in range(last) if not places[i].matches]


def judged_plainly(rule: Relaxed, tree: DraftTree, view: TableView) -> Verdict:
    """Every root-to-leaf candidate by the loop above; the longest, then the least relaxed, then the first."""
    best: tuple[int, int, int] | None = None
    best_path: list[int] = []
    best_relaxed: frozenset[int] = frozenset()
    leaves = [node for node in range(len(tree)) if node not in tree.parents]
    for leaf in leaves:
        path: list[int] = []
        node = leaf
        while node != ROOT:
            path.insert(0, node)
            node = tree.parents[node]
        places = []
        for node in path:
            before = tree.parents[node]
            gap = view.gaps[before, tree.tokens[node]]
            near = tree.sources[node] in rule.sources and gap is not None and gap <= rule.tau
            places.append(Place(view.choices[before] == tree.tokens[node], near))
        last, relaxed = papers_loop(places, rule.attempts, rule.matches)
        kept = path[:last]
        rank = (-last, len(relaxed), kept[-1] if kept else ROOT)
        if best is None or rank < best:
            best, best_path = rank, kept
            best_relaxed = frozenset(path[i] for i in relaxed)
    return Verdict(tuple(best_path), view.choices[best_path[-1] if best_path else ROOT], best_relaxed)


rules = st.builds(
    Relaxed,
    sources=st.sampled_from([COPIED, frozenset({"left", "right"}), frozenset()]),
    tau=st.sampled_from([0.0, 0.5, 3.0]),
    attempts=st.integers(0, 4),
    matches=st.integers(1, 4),
)


@settings(max_examples=600, deadline=None)
@given(tables(), rules)
def test_a_tree_is_judged_as_the_papers_loop_judges_its_candidates(
    case: tuple[DraftTree, TableView], rule: Relaxed
) -> None:
    tree, view = case
    assert judge(rule, tree, view) == judged_plainly(rule, tree, view)


def test_the_trees_above_are_often_relaxed() -> None:
    """So that the comparison above compares something: wins over matching, by one relaxed token and by more."""
    rng = random.Random(0)
    relaxed: list[int] = []
    rule = Relaxed(frozenset({"left", "right"}), attempts=3, matches=2)
    for _ in range(300):
        places = 24
        chain = DraftTree.chain([rng.randrange(3) for _ in range(places)], "left")
        choices = {node - 1: t if rng.random() < 0.7 else 9 for node, t in enumerate(chain.tokens)}
        choices[places - 1] = 0
        gaps: dict[tuple[int, int], float | None] = {
            (node - 1, token): rng.choice([1.0, 2.0, 5.0]) for node, token in enumerate(chain.tokens)
        }
        view = TableView(choices, gaps)
        verdict = judge(rule, chain, view)
        assert verdict == judged_plainly(rule, chain, view)
        relaxed.append(len(verdict.relaxed))
    assert relaxed.count(1) > 20
    assert sum(count > 1 for count in relaxed) > 10


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.builds(Place, st.booleans(), st.booleans()), max_size=30),
    st.integers(0, 5),
    st.integers(1, 4),
)
def test_one_candidate_is_kept_as_far_as_the_papers_loop_keeps_it(
    places: list[Place], attempts: int, run_length: int
) -> None:
    accepted = look_ahead(
        range(len(places)), lambda i: places[i].matches, lambda i: places[i].near, attempts, run_length
    )
    last, relaxed = papers_loop(places, attempts, run_length)
    assert accepted == Accepted(last, tuple(relaxed))
    # What follows of it: at most one relaxed token an attempt, each of them near, and matches at the end.
    assert len(accepted.relaxed) <= attempts
    assert all(places[i].near and not places[i].matches for i in accepted.relaxed)
    if accepted.relaxed:
        assert accepted.length - accepted.relaxed[-1] - 1 >= run_length


EXAMPLES = [
    # places (M matches, N near, x neither), attempts, matches that must follow, kept, relaxed
    ("MMNMMM", 1, 3, 6, 1),
    ("MMNMM", 2, 3, 2, 0),  # too few matches behind
    ("MMxMMM", 2, 3, 2, 0),
    ("MMNMMMNMMM", 2, 3, 10, 2),
    ("MMNMMMNMMM", 1, 3, 6, 1),  # one attempt
    ("MMNNMMM", 2, 3, 7, 2),  # the first is provisional and kept by the second
    ("MMNNMMM", 1, 3, 2, 0),  # the first alone has no matches behind it
    ("MMNNxMMM", 3, 3, 2, 0),  # both provisional, then a failed check
    ("MMNMNMMM", 2, 3, 2, 0),  # the second attempt looks at the match, the third would succeed
    ("MMNMNMMM", 3, 3, 8, 2),
    ("NMMMMx", 2, 3, 5, 1),
    ("MMMM", 2, 3, 4, 0),
    ("", 2, 3, 0, 0),
    ("NMMMxMMM", 2, 3, 4, 1),
]


@pytest.mark.parametrize(("places", "attempts", "run_length", "kept", "relaxed"), EXAMPLES)
def test_examples(places: str, attempts: int, run_length: int, kept: int, relaxed: int) -> None:
    accepted = look_ahead(
        range(len(places)),
        lambda i: places[i] == "M",
        lambda i: places[i] in "MN",
        attempts,
        run_length,
    )
    assert (accepted.length, len(accepted.relaxed)) == (kept, relaxed)


# --- one tree, several candidates ----------------------------------------------------------------------------


def several(*candidates: tuple[str, str]) -> tuple[DraftTree, TableView]:
    """Candidates that share no token, each of one source and described as in the examples above."""
    tokens: list[int] = []
    parents: list[int] = []
    sources: list[str] = []
    choices: dict[int, int] = {ROOT: -1}
    gaps: dict[tuple[int, int], float | None] = {}
    for places, source in candidates:
        before = ROOT
        for place in places:
            token = 100 + len(tokens)
            if place == "M":
                choices[before] = token
            gaps[before, token] = {"M": 0.0, "N": 1.0, "x": None}[place]
            parents.append(before)
            before = len(tokens)
            choices[before] = -1
            tokens.append(token)
            sources.append(source)
    return DraftTree(tuple(tokens), tuple(parents), tuple(sources)), TableView(choices, gaps)


def winner(*candidates: tuple[str, str], attempts: int = 2) -> int | None:
    """Which candidate is kept."""
    tree, view = several(*candidates)
    verdict = judge(Relaxed(COPIED, attempts=attempts, matches=2), tree, view)
    if not verdict.path:
        return None
    ends = np.cumsum([len(places) for places, _ in candidates])
    return int(np.searchsorted(ends, verdict.path[0], side="right"))


def test_the_candidate_kept_furthest_wins() -> None:
    assert winner(("NMM", "left"), ("NMMM", "left")) == 1
    assert winner(("MM", "left"), ("NMM", "left")) == 1
    assert winner(("MMMM", "left"), ("NMM", "left")) == 0


def test_of_equals_the_less_relaxed_one_wins_then_the_first() -> None:
    assert winner(("NNMM", "left"), ("NMMM", "left")) == 1
    assert winner(("NMM", "left"), ("MMM", "left")) == 1
    assert winner(("NMM", "left"), ("NMM", "left")) == 0


def test_only_copied_nodes_are_relaxed() -> None:
    assert winner(("NMM", "right")) is None
    assert winner(("NMM", "right"), ("NMM", "left")) == 1
    assert winner(("MM", "right"), ("xMM", "left")) == 0


def test_matches_behind_a_relaxed_node_may_be_anybodys() -> None:
    """They are matches, which no source makes doubtful."""
    tree, view = several(("NMM", "left"))
    mixed = DraftTree(tree.tokens, tree.parents, ("left", "right", "right"))
    assert judge(Relaxed(COPIED, matches=2), mixed, view).path == (0, 1, 2)


def test_the_bonus_follows_the_last_node_that_is_kept() -> None:
    tree, view = several(("NMMx", "left"))
    view.choices[2] = 77
    verdict = judge(Relaxed(COPIED, matches=2), tree, view)
    assert verdict == Verdict((0, 1, 2), 77, frozenset({0}))


def test_an_empty_tree_is_the_targets_turn() -> None:
    assert judge(Relaxed(COPIED), EMPTY, TableView({ROOT: 5}, {})) == Verdict((), 5)


@settings(max_examples=200, deadline=None)
@given(tables())
def test_without_attempts_or_sources_or_tolerance_it_is_matching(case: tuple[DraftTree, TableView]) -> None:
    tree, view = case
    strict = judge(Matching(), tree, view)
    for rule in (Relaxed(frozenset({"left", "right"}), attempts=0), Relaxed(frozenset(), matches=1)):
        assert judge(rule, tree, view) == strict
    # No two tokens are exactly as likely.
    view.gaps = {
        (node, token): gap if view.choices[node] == token or gap is None else max(gap, 1e-9)
        for (node, token), gap in view.gaps.items()
    }
    assert judge(Relaxed(frozenset({"left", "right"}), tau=0.0, matches=1), tree, view) == strict


@pytest.mark.parametrize(
    "wrong",
    [
        {"tau": -0.1},
        {"tau": math.nan},
        {"tau": math.inf},
        {"tau": True},
        {"tau": "3"},
        {"top_k": 0},
        {"top_k": 2.0},
        {"attempts": -1},
        {"attempts": True},
        {"matches": 0},
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        Relaxed(COPIED, **wrong)
    assert caught.value.field == next(iter(wrong))


# --- the whole loop ------------------------------------------------------------------------------------------

VOCAB = 7


@settings(max_examples=120, deadline=None)
@given(
    table=st.integers(0, 300),
    seed=st.integers(0, 10**6),
    rule=st.builds(
        Relaxed,
        sources=st.just(COPIED),
        top_k=st.sampled_from([2, 5, 20]),
        tau=st.sampled_from([0.3, 1.0, 3.0]),
        attempts=st.integers(1, 3),
        matches=st.integers(1, 2),
    ),
    penalty=st.sampled_from([1.0, 1.4]),
    log_probs=st.sampled_from([None, 0, 2]),
)
def test_every_token_is_the_targets_choice_or_near_it(
    table: int, seed: int, rule: Relaxed, penalty: float, log_probs: int | None
) -> None:
    """Given the text before it, relaxed tokens included."""
    model = ToyModel(VOCAB, order=1, scale=1.0, seed=table)
    params = SamplingParams(repetition_penalty=penalty)
    prompt = [1, 2]
    truth = plain_decoding(model, prompt, max_tokens=30, sampling=params).tokens
    drafter = RandomDrafter(seed, VOCAB, truth)
    asked = Settings(StopConditions(30), params, log_probs)
    decoded = run(decoding(model, prompt, asked, drafter, Budgets([12]), rule=rule))
    tokens = [token for step in decoded.steps for token in step.tokens]
    chain = build_processors(params)
    state, done = chain.start(prompt), list(prompt)
    for token in tokens:
        logits = chain.apply(model.logits(done), state).astype(np.float64)
        best = np.argsort(-logits, kind="stable")
        assert token.relaxed == (token.token != best[0])
        if token.relaxed:
            assert token.token in best[: rule.top_k]
            assert logits[best[0]] - logits[token.token] <= rule.tau + 1e-5
            assert token.source in rule.sources
        if log_probs is not None:
            assert token.log_prob == pytest.approx(log_softmax(model.logits(done))[token.token], abs=1e-5)
        state, done = chain.advance(state, token.token), [*done, token.token]
    for step, round in zip(decoded.steps, drafter.rounds, strict=True):
        relaxed = [token for token in step.tokens if token.relaxed]
        assert len(relaxed) == len(round.verdict.relaxed) <= rule.attempts
        if step.tokens[-1].source == TARGET:
            assert not step.tokens[-1].relaxed


def test_relaxation_changes_the_text_and_saves_passes() -> None:
    """A copy with one small difference, as between 'the' and 'that': strictly its rest is lost."""
    model = ToyModel(VOCAB, order=1, scale=1.0, seed=3)
    truth = plain_decoding(model, [1, 2], max_tokens=40, sampling=SamplingParams()).tokens

    def passes(rule: Relaxed | Matching) -> tuple[int, int]:
        total = relaxed = 0
        for seed in range(30):
            drafter = RandomDrafter(seed, VOCAB, truth)
            asked = Settings(StopConditions(40))
            decoded = run(decoding(model, [1, 2], asked, drafter, Budgets([12]), rule=rule))
            total += len(decoded.steps)
            relaxed += sum(token.relaxed for step in decoded.steps for token in step.tokens)
        return total, relaxed

    strict, none = passes(Matching())
    fewer, some = passes(Relaxed(frozenset({"left", "right"}), matches=1))
    assert none == 0
    assert some > 10
    assert fewer < strict


def test_a_cut_inside_an_accepted_run_forgets_what_was_relaxed_behind_it() -> None:
    """The text ends at a stop token; relaxed tokens behind it were never said."""
    model = ToyModel(VOCAB, order=1, scale=1.0, seed=3)
    prompt = [1]
    seen = 0
    for seed in range(200):
        drafter = RandomDrafter(seed, VOCAB)
        rule = Relaxed(frozenset({"left", "right"}), matches=1, attempts=3)
        stop = StopConditions(30, frozenset([seed % VOCAB]))
        decoded = run(decoding(model, prompt, Settings(stop), drafter, Budgets([20]), rule=rule))
        last = drafter.rounds[-1]
        assert last.verdict.relaxed <= set(last.verdict.path)
        whole = rule.judge(
            last.tree,
            TargetView(last.tree, last.rows, SamplingParams(), build_processors(SamplingParams()), (), 0),
        )
        seen += len(whole.relaxed) > len(last.verdict.relaxed)
        assert decoded.tokens[-1] == seed % VOCAB or decoded.reason == "length"
    assert seen > 0


# --- speed ---------------------------------------------------------------------------------------------------


def crossed_tree() -> tuple[DraftTree, list[int]]:
    """60 nodes: a run of 20 matches, and a candidate of 8 nodes that leaves it at every fourth of them."""
    tokens = list(range(20))
    parents = list(range(-1, 19))
    for start in range(0, 20, 4):
        parent = start
        for depth in range(8):
            tokens.append(30 + depth)
            parents.append(parent)
            parent = len(tokens) - 1
    return DraftTree(tuple(tokens), tuple(parents), ("left",) * len(tokens)), tokens


def test_a_judgement_is_quick() -> None:
    """Far below a pass of any model; the bound is wide, as a busy machine is slow."""
    tree, tokens = crossed_tree()
    assert len(tree) == 60
    rows = []
    for node in range(ROOT, len(tree)):
        logits = np.zeros(64, dtype=np.float32)
        children = [tokens[n] for n in range(60) if tree.parents[n] == node]
        for rank, token in enumerate(children):
            logits[token] = 5 - rank
        rows.append(_row(logits, Outputs(argmax=True, top_k=5)))
    chain = build_processors(SamplingParams())

    def judged(rows: Sequence[Row]) -> Verdict:
        return Relaxed(COPIED).judge(tree, TargetView(tree, rows, SamplingParams(), chain, (), 0))

    assert judged(rows).path
    took = []
    for _ in range(50):
        began = time.perf_counter()
        judged(rows)
        took.append(time.perf_counter() - began)
    assert min(took) < 1e-3
