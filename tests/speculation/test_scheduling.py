"""The cost-aware schedule: what it makes of what passes cost and guesses are worth."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.engine.passes import Others, PassReport
from specrag.engine.session import Session
from specrag.engine.stopping import StopConditions
from specrag.errors import InputError
from specrag.methods.retrieval_decoder import RetrievalDecoder
from specrag.methods.token_decoders import Drafted
from specrag.models.toy import ToyModel
from specrag.speculation.decode import Settings
from specrag.speculation.drafters.suffix import SUFFIX, copy_grade
from specrag.speculation.schedule.base import FixedBudget, Timed
from specrag.speculation.schedule.cost_model import ByModel
from specrag.speculation.schedule.tokens import CostAware, SharedCosts, children_of
from specrag.speculation.tree import EMPTY, ROOT, DraftTree, Round, Verdict
from tests.speculation.guessing import random_tree
from tests.speculation.machines import crowd, machine, packed, taught


def a_round(tree: DraftTree, right: list[int], proposed: DraftTree | None = None) -> Round:
    """The round in which the target's tokens are ``right``."""
    path: list[int] = []
    node: int | None = ROOT
    for token in right:
        assert node is not None
        node = tree.child(node, token)
        if node is None:
            break
        path.append(node)
    tokens = tuple(right[: len(path) + 1])
    return Round(tree, (), Verdict(tuple(path), tokens[-1]), tokens, tree if proposed is None else proposed)


@given(st.integers(0, 10**6), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_what_is_chosen_is_a_part_of_the_tree_with_the_best_rate(seed: int, nodes: int) -> None:
    """Against every other cut of the same order: the expected tokens per second are the highest."""
    rng = random.Random(seed)
    shared = SharedCosts(taught())
    for source, grade in itertools.product(("left", "right"), range(3)):
        chance = rng.random()
        kind = DraftTree.chain([1], source, [grade])
        for _ in range(20):
            shared.acceptance.observe(kind, children_of(kind), (1 if rng.random() < chance else 2,))
    plain = random_tree(rng, nodes, 6)
    tree = DraftTree(
        plain.tokens, plain.parents, plain.sources, tuple(rng.randrange(3) for _ in plain.tokens)
    )
    schedule = CostAware(shared)
    chosen = schedule.choose(tree, 500)
    paths = {path_of(tree, node): node for node in range(len(tree))}
    kept = [paths[path_of(chosen, node)] for node in range(len(chosen))]
    assert [tree.sources[node] for node in kept] == list(chosen.sources)
    assert [tree.grades[node] for node in kept] == list(chosen.grades)

    def chance_of(node: int) -> float:
        own = shared.acceptance.rate(tree.sources[node], tree.grades[node])
        parent = tree.parents[node]
        return own * (1.0 if parent == ROOT else chance_of(parent))

    def rate(nodes: list[int]) -> float:
        return (1 + sum(map(chance_of, nodes))) / float(shared.passes.seconds(1 + len(nodes), 500))

    best_first = sorted(range(len(tree)), key=chance_of, reverse=True)
    for count in range(len(tree) + 1):
        assert rate(kept) >= rate(best_first[:count]) - 1e-9


def path_of(tree: DraftTree, node: int) -> tuple[int, ...]:
    path: list[int] = []
    while node != ROOT:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return tuple(reversed(path))


def drive(schedule: CostAware, accept: float, rounds: int, *, price: float = 0.0) -> list[int]:
    """Rounds of a chain drafter whose guesses are right with this chance; how much each verified."""
    rng = random.Random(3)
    verified = []
    for turn in range(rounds):
        budget = schedule.budget(runs_passes=price > 0)
        proposed = DraftTree.chain([1] * min(budget, 12), "draft")
        tree = schedule.choose(proposed, 300)
        right = [1 if rng.random() < accept else 2 for _ in range(20)]
        cost = machine(1 + len(tree), 300)
        proposing = price * len(proposed)
        timed = Timed(300 + turn, proposing, cost, cost + proposing + 0.0005)
        schedule.observe(a_round(tree, right, proposed), timed)
        verified.append(len(tree))
    return verified


def test_hopeless_guesses_are_soon_left_out() -> None:
    verified = drive(CostAware(SharedCosts()), accept=0.0, rounds=60)
    assert sum(verified[20:]) <= 2
    assert sum(verified) < 30


def test_good_guesses_are_made_longer() -> None:
    verified = drive(CostAware(SharedCosts()), accept=0.95, rounds=60)
    assert np.mean(verified[20:]) > 8


def test_guessing_comes_back_when_it_pays_again() -> None:
    schedule = CostAware(SharedCosts())
    drive(schedule, accept=0.0, rounds=60)
    verified = drive(schedule, accept=0.95, rounds=80)
    assert np.mean(verified[-20:]) > 8


def test_a_dear_drafter_is_asked_less_and_hardly_where_it_never_pays() -> None:
    cheap, dear, useless = (CostAware(SharedCosts()) for _ in range(3))
    short = drive(dear, accept=0.7, rounds=80, price=0.008)
    long = drive(cheap, accept=0.7, rounds=80, price=0.001)
    assert 0 < np.mean(short[20:]) < np.mean(long[20:])
    asked = drive(useless, accept=0.1, rounds=200, price=0.02)
    assert np.mean([count > 0 for count in asked[60:]]) < 0.1


def test_own_weights_are_not_taken_for_free_before_a_guess_was_timed() -> None:
    unknown, own = CostAware(SharedCosts()), CostAware(SharedCosts(), own_context=300)
    far = CostAware(SharedCosts(), own_context=300)
    for schedule, context in ((unknown, 300), (own, 300), (far, 40_000)):
        schedule.choose(EMPTY, context)
    assert unknown.budget(runs_passes=True) > 2
    assert own.budget(runs_passes=True) == 0
    assert far.budget(runs_passes=True) >= 2, "what spares so much context is worth a try at once"


@pytest.mark.parametrize("requests", [1, 10])
def test_a_drafter_that_never_pays_costs_little(requests: int) -> None:
    """However the rounds are shared out over requests: what others lost by trying is known."""
    shared, rounds = SharedCosts(), 400
    proposed, proposing, total = 0, 0.0, 0.0
    for _ in range(requests):
        schedule = CostAware(shared, own_context=300)
        for turn in range(rounds // requests):
            tree = DraftTree.chain([1] * schedule.budget(runs_passes=True), "draft")
            chosen = schedule.choose(tree, 300)
            price, cost = 0.015 * len(tree), machine(1 + len(chosen), 300)
            schedule.observe(a_round(chosen, [2] * 20, tree), Timed(300 + turn, price, cost, price + cost))
            proposed, proposing, total = proposed + len(tree), proposing + price, total + price + cost
    assert proposed > 0, "it is tried"
    assert proposing / total < 0.05


def test_copies_are_weighed_against_a_drafter_that_runs_passes() -> None:
    sure = DraftTree.chain([1] * 6, SUFFIX, [copy_grade(16, 0, math.log(0.9))] * 6)
    doubtful = DraftTree.chain([1] * 6, SUFFIX, [copy_grade(1, 0, -math.inf)] * 6)
    cheap, dear = (
        CostAware(SharedCosts(passes=taught(), depth_rate=0.7, draft_seconds=each)) for each in (0.001, 0.03)
    )
    for schedule, tree, preferred in (
        (cheap, sure, True),
        (cheap, doubtful, False),
        (dear, sure, True),
        (dear, doubtful, True),  # or nothing of it: the drafter would cost more than it gives
    ):
        schedule.choose(EMPTY, 300)
        assert schedule.prefers(tree) == preferred


def test_copies_that_lose_do_not_silence_a_drafter_that_runs_passes() -> None:
    alone, beside = CostAware(SharedCosts()), CostAware(SharedCosts())
    beside.budget(runs_passes=True)
    for schedule in (alone, beside):
        drive(schedule, accept=0.0, rounds=60)
    assert min(alone.budget(runs_passes=False) for _ in range(3)) == 0
    assert min(beside.budget(runs_passes=False) for _ in range(40)) > 0


def test_the_more_requests_share_a_pass_the_likelier_a_guess_must_be() -> None:
    """What is chosen gives the whole pass the highest rate, the others' tokens included."""
    shared = SharedCosts(passes=taught())
    chosen = []
    for count in (0, 2, 8, 32):
        schedule = CostAware(shared)
        tree = DraftTree.chain([1] * 12, "draft")
        timed = Timed(
            300, 0.0, 0.05, 0.05, PassReport(packed(1, 300, crowd(count)), crowd(count), crowd(count))
        )
        schedule.observe(a_round(EMPTY, [1], EMPTY), timed)
        kept = len(schedule.choose(tree, 300))
        chance = shared.acceptance.rate("draft", 0)

        def rate(nodes: int, count: int = count, chance: float = chance) -> float:
            tokens = count + sum(chance**depth for depth in range(nodes + 1))
            return tokens / float(shared.passes.seconds(1 + nodes, 300, crowd(count)))

        assert rate(kept) == pytest.approx(max(rate(nodes) for nodes in range(13)), rel=0.01)
        chosen.append(kept)
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] > chosen[-1]


def test_requests_that_begin_together_know_of_one_another() -> None:
    """None has been in a pass yet, and what the last request left behind was a pass alone."""
    tree = DraftTree.chain(range(30), "suffix")
    shared = SharedCosts(taught())
    shared.acceptance.observe(tree, children_of(tree), tuple(range(30)))
    alone = CostAware(shared)
    assert alone.budget(runs_passes=False) > 0
    chosen = len(alone.choose(tree, 300).tokens)
    others = [CostAware(shared) for _ in range(31)]
    assert len(CostAware(shared).choose(tree, 300).tokens) < chosen
    del others
    assert len(CostAware(shared).choose(tree, 300).tokens) == chosen


def test_proposals_that_everybody_waits_for_are_weighed_by_what_a_token_costs() -> None:
    """A fifth of a millisecond is little of a pass of sixteen requests, and much of one request's share of it."""
    asked = {}
    guess = DraftTree.chain([5], "lookup")
    for requests in (0, 15):
        shared = SharedCosts()
        for _ in range(100):
            shared.acceptance.observe(guess, children_of(guess), (6,))
        schedule = CostAware(shared)
        others = Others(requests, requests, 300 * requests, 300 * requests)
        count = 0
        for _ in range(200):
            proposed = EMPTY
            if schedule.budget(runs_passes=False):
                count += 1
                proposed = guess
            tree = schedule.choose(proposed, 300)
            seconds = machine(1 + len(tree.tokens) + requests, 300 * (1 + requests))
            timed = Timed(300, 0.0002, seconds, seconds + 0.0003, PassReport(seconds, others, others))
            schedule.observe(a_round(tree, [6], proposed), timed)
        asked[requests] = count
    assert asked[15] < 60 < asked[0]


def test_a_prompt_that_others_read_makes_no_guess_cheap() -> None:
    """What is chosen beside a prompt is what is chosen without it, and the prompt's rows still teach the costs."""
    shared = SharedCosts(passes=taught())
    tree = DraftTree.chain([1] * 12, "draft")
    writing = crowd(8)
    beside = Others(9, writing.rows + 256, writing.context, writing.row_context)
    chosen = []
    for others in (writing, beside):
        schedule = CostAware(shared)
        report = PassReport(packed(1, 300, others), others, writing)
        schedule.observe(a_round(EMPTY, [1], EMPTY), Timed(300, 0.0, 0.05, 0.05, report))
        chosen.append(len(schedule.choose(tree, 300)))
    assert chosen[0] == chosen[1] < 12
    assert shared.passes.seconds(1, 300, beside) > 2 * shared.passes.seconds(1, 300, writing)


def test_waiting_for_others_is_no_price_of_a_pass() -> None:
    report = PassReport(0.02, Others(), Others())
    assert Timed(10, 0.0, 0.5, 0.6, report).computing == 0.02
    assert Timed(10, 0.0, 0.5, 0.6).computing == 0.5


def test_nothing_proposed_is_nothing_chosen() -> None:
    assert CostAware(SharedCosts()).choose(EMPTY, 10) is EMPTY


def test_a_fixed_budget_keeps_everything() -> None:
    tree = DraftTree.chain([1, 2, 3], "a")
    schedule = FixedBudget(3)
    assert schedule.budget(runs_passes=True) == schedule.budget(runs_passes=False) == 3
    assert schedule.choose(tree, 100) is tree
    for wrong in (-1, 1.5, True):
        with pytest.raises(InputError, match="budget"):
            FixedBudget(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "method", [RetrievalDecoder(drafter="none"), Drafted("prompt-lookup", "lookup", None)]
)
def test_models_are_priced_apart(method: RetrievalDecoder | Drafted) -> None:
    """A pass of one model takes a second, one of the other a thousandth."""

    def ask(model: ToyModel, seconds: float) -> float:
        schedule = method.speculation(Session(model), Settings(StopConditions(9))).schedule
        for rows in (1, 2, 1, 2):
            schedule.observe(
                a_round(DraftTree.chain([1] * (rows - 1), "a"), [1] * rows), Timed(10, 0, seconds, seconds)
            )
        assert isinstance(schedule, CostAware)
        return float(schedule._costs.seconds(1, 10))

    slow, fast = ToyModel(vocab_size=9), ToyModel(vocab_size=9)
    assert ask(slow, 1.0) == pytest.approx(1.0, rel=0.2)
    assert ask(fast, 0.001) == pytest.approx(0.001, rel=0.2)
    assert ask(slow, 1.0) == pytest.approx(1.0, rel=0.2)


def test_what_is_learned_goes_with_the_weights_their_device_and_their_type() -> None:
    class Weights:
        pass

    class Wrapped(ToyModel):
        def __init__(self, module: Weights, device: str, dtype: str) -> None:
            super().__init__(vocab_size=9)
            self.module, self.device, self.dtype = module, device, dtype

    weights, learned = Weights(), ByModel(SharedCosts)
    first = learned.of(Wrapped(weights, "cpu", "bf16"))
    assert learned.of(Wrapped(weights, "cpu", "bf16")) is first
    others = [("cuda", "bf16"), ("cpu", "fp32")]
    assert all(learned.of(Wrapped(weights, *other)) is not first for other in others)
    assert learned.of(Wrapped(Weights(), "cpu", "bf16")) is not first
