"""Exact laws of what random decoding gives: every outcome is played, with its probability."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specrag.engine.sampling import Distribution, warp
from specrag.engine.sampling_params import SamplingParams
from specrag.models.toy import ToyModel
from specrag.speculation.drafters.rag import RAG
from specrag.speculation.tree import ROOT, DraftTree

Law = dict[tuple[int, ...], float]

#: Source of guesses that were drawn at random, as a RAG drafter's are; others are copies.
DRAWN = "drawn"
#: Length of the texts whose laws are compared.
TOKENS = 3

PARAMS = {
    "plain": SamplingParams(temperature=1.0),
    "temperature": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(temperature=1.3, top_k=3),
    "top-p": SamplingParams(temperature=0.9, top_p=0.8),
    "min-p": SamplingParams(temperature=1.0, min_p=0.15),
    "all": SamplingParams(temperature=1.4, top_k=4, top_p=0.95, min_p=0.05),
    "greedy": SamplingParams(),
}


@dataclass
class Dice:
    """Replays the first outcomes of a sequence of draws, and says what else could have come."""

    script: list[int]
    weight: float = 1.0
    used: int = 0
    branches: list[list[int]] = field(default_factory=list)

    def throw(self, probs: np.ndarray) -> int:
        outcomes = np.flatnonzero(probs)
        if self.used == len(self.script):
            # The first visit takes the first outcome; the others are to be visited later.
            self.branches += [[*self.script, int(other)] for other in outcomes[1:]]
            self.script.append(int(outcomes[0]))
        token = self.script[self.used]
        self.used += 1
        self.weight *= float(probs[token])
        return token

    def throw_in_proportion(self, weights: np.ndarray) -> int:
        """As :meth:`throw`, of weights that need not sum to 1."""
        return self.throw(weights / weights.sum())


@dataclass
class UniformNumber:
    """A number between 0 and 1 of which only comparisons are known: each throws the dice and narrows its range.

    It may be multiplied by a positive number and compared by ``<``; so the chance that a rule accepts is
    exact, whatever threshold the rule has.
    """

    dice: Dice
    low: float = 0.0
    high: float = 1.0
    scale: float = 1.0

    def __mul__(self, factor: float) -> UniformNumber:
        return UniformNumber(self.dice, self.low, self.high, self.scale * float(factor))

    def __lt__(self, threshold: float) -> bool:
        place = float(threshold) / self.scale
        below = min(max((place - self.low) / (self.high - self.low), 0.0), 1.0)
        is_below = self.dice.throw(np.array([1 - below, below])) == 1
        self.low, self.high = (self.low, place) if is_below else (place, self.high)
        return is_below


def outcomes(play: Callable[[Dice], tuple[int, ...]]) -> Law:
    """The exact law of what ``play`` returns, over all outcomes of its dice."""
    law: Law = defaultdict(float)
    left: list[list[int]] = [[]]
    while left:
        dice = Dice(left.pop())
        law[play(dice)] += dice.weight
        left += dice.branches
    return law


def distance(left: Law, right: Law) -> float:
    """Largest difference of a probability."""
    return max(abs(left.get(key, 0.0) - right.get(key, 0.0)) for key in {*left, *right})


def target_probs(model: ToyModel, params: SamplingParams, tokens: Sequence[int]) -> np.ndarray:
    return warp(model.logits(tokens), params).dense(model.vocab_size)


def plain_law(model: ToyModel, params: SamplingParams, prompt: list[int], count: int = TOKENS) -> Law:
    """Plain decoding's, token by token."""
    law: Law = {(): 1.0}
    for _ in range(count):
        longer: Law = defaultdict(float)
        for tokens, weight in law.items():
            for token, prob in enumerate(target_probs(model, params, [*prompt, *tokens])):
                if prob:
                    longer[*tokens, token] += weight * prob
        law = longer
    return law


def law_by_rounds(round_law: Callable[[tuple[int, ...]], Law], count: int = TOKENS) -> Law:
    """The law of the first ``count`` tokens, where a round's law depends on the tokens before it alone.

    Args:
        round_law: from the output so far to the law of the tokens that a round adds.
    """
    known: dict[tuple[int, ...], Law] = {}

    def completed(output: tuple[int, ...]) -> Law:
        if len(output) >= count:
            return {output[:count]: 1.0}
        if output not in known:
            law: Law = defaultdict(float)
            for added, weight in round_law(output).items():
                for whole, rest in completed(output + added).items():
                    law[whole] += weight * rest
            known[output] = law
        return known[output]

    return completed(())


@dataclass
class DiceView:
    """A rule's view of a tree behind a context, with dice for every random number; every draw is a new one."""

    model: ToyModel
    params: SamplingParams
    context: Sequence[int]
    tree: DraftTree
    dice: Dice

    def draw(self, node: int) -> int:
        return self.dice.throw(target_probs(self.model, self.params, self._tokens(node)))

    def gap(self, node: int, token: int, top_k: int) -> float | None:
        logits = self.model.logits(self._tokens(node)).astype(np.float64)
        best = np.argsort(-logits, kind="stable")[:top_k]
        return float(logits.max() - logits[token]) if token in best else None

    def probs(self, node: int, params: SamplingParams | None = None) -> Distribution:
        return warp(self.model.logits(self._tokens(node)), self.params if params is None else params)

    def uniform(self, node: int) -> float:
        return UniformNumber(self.dice)  # type: ignore[return-value]  # as far as a rule may tell

    def draw_from(self, node: int, probs: NDArray[np.float64]) -> int:
        return self.dice.throw_in_proportion(probs)

    def guess_from(self, node: int, draft: NDArray[np.float64]) -> int:
        """What was drawn behind the node, if anything was: the keyed draw is the guess itself."""
        for child, parent in enumerate(self.tree.parents):
            if parent == node and self.tree.sources[child] in (DRAWN, RAG):
                return self.tree.tokens[child]
        return self.dice.throw(draft)

    def _tokens(self, node: int) -> list[int]:
        path: list[int] = []
        while node != ROOT:
            path.append(self.tree.tokens[node])
            node = self.tree.parents[node]
        return [*self.context, *path[::-1]]
