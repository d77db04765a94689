"""The target's view of a scored draft tree: what it would draw after each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from specrag.engine import (
    Chain,
    Distribution,
    LogitsProcessor,
    Outputs,
    Row,
    SamplingParams,
    Session,
    State,
    build_processors,
    choose,
    keyed_choice,
    keyed_uniform,
    log_softmax,
    warp,
)
from specrag.speculation.acceptance import RowNeeds
from specrag.speculation.tree import ROOT, DraftTree

#: Streams of random numbers beside the token draws; no token id has such a value.
_ACCEPTANCE_STREAM = np.array([2**62])
_RESIDUAL_STREAM = 2**61
_DRAFT_STREAM = 2**60


class TargetView:
    """The target's answers about a scored tree, for acceptance rules, which may ask in any order.

    Args:
        tree: what was scored.
        rows: ``[1 + len(tree)]`` answers: after the session's newest token, then after each node.
        sampling: how tokens are drawn.
        chain: the logits processors.
        state: their state after the session's newest token.
        length: tokens of the session: the position of the draw after :data:`ROOT`.
    """

    def __init__(
        self,
        tree: DraftTree,
        rows: Sequence[Row],
        sampling: SamplingParams,
        chain: Chain,
        state: State,
        length: int,
    ) -> None:
        self._tree = tree
        self._rows = rows
        self._sampling = sampling
        self._chain = chain
        self._states = {ROOT: state}
        self._positions = {ROOT: length}
        self._draws: dict[int, int] = {}

    def draw(self, node: int) -> int:
        """The target's own token after a node, by its keyed draw; the likeliest one for greedy decoding."""
        if node not in self._draws:
            row = self._rows[node + 1]
            if row.argmax is not None and self._sampling.greedy and not self._chain.processors:
                self._draws[node] = row.argmax
            else:
                self._draws[node] = choose(self._logits(node), self._sampling, self._position(node))
        return self._draws[node]

    def gap(self, node: int, token: int, top_k: int) -> float | None:
        """How far a token's log-probability after a node lies below the likeliest one's, in nats.

        Args:
            node: a node or :data:`ROOT`.
            token: the token asked about.
            top_k: ``None`` is returned unless the token is among this many likeliest ones.
        """
        row = self._rows[node + 1]
        # The top tokens are the model's own; a small vocabulary has fewer than requested.
        if self._chain.processors or row.top_tokens is None:
            logits = np.asarray(self._logits(node), dtype=np.float64)
            better = np.count_nonzero(logits > logits[token]) + np.count_nonzero(
                logits[:token] == logits[token]
            )
            return None if better >= top_k else float(logits.max() - logits[token])
        assert row.top_log_probs is not None
        found = np.flatnonzero(row.top_tokens[:top_k] == token)
        return None if found.size == 0 else float(row.top_log_probs[0] - row.top_log_probs[found[0]])

    def probs(self, node: int, params: SamplingParams | None = None) -> Distribution:
        """The target's distribution after a node, after temperature, top-k, top-p and min-p.

        These are the request's own, or those of ``params``.
        """
        return warp(self._logits(node), self._sampling if params is None else params)

    def uniform(self, node: int) -> float:
        """A number between 0 and 1 for accepting or rejecting what follows a node; independent of its draw."""
        return float(keyed_uniform(self._sampling.seed, self._position(node), _ACCEPTANCE_STREAM)[0])

    def draw_from(self, node: int, probs: NDArray[np.float64]) -> int:
        """A token from another distribution (``[vocab_size]``, need not sum to 1), drawn in the node's place."""
        return keyed_choice(self._sampling.seed, self._position(node), probs, _RESIDUAL_STREAM)

    def guess_from(self, node: int, draft: NDArray[np.float64]) -> int:
        """The token that a drafter of this distribution (``[vocab_size]``) guesses after a node, by its keyed draw."""
        return draw_guess(draft, self._sampling.seed, self._position(node))

    def _logits(self, node: int) -> NDArray[np.floating]:
        logits = self._rows[node + 1].logits
        assert logits is not None
        return self._chain.apply(logits, self._state(node)) if self._chain.processors else logits

    def _state(self, node: int) -> State:
        if node not in self._states:
            parent = self._state(self._tree.parents[node])
            self._states[node] = self._chain.advance(parent, self._tree.tokens[node])
        return self._states[node]

    def _position(self, node: int) -> int:
        if node not in self._positions:
            self._positions[node] = self._position(self._tree.parents[node]) + 1
        return self._positions[node]


def draw_guess(draft: NDArray[np.float64], seed: int, position: int) -> int:
    """A drafter's guess, drawn from its distribution independently of the target.

    Keyed by seed and position, so that a rule can tell what would have been guessed where no guess was made.

    Args:
        draft: ``[vocab_size]``.
        seed: the request's.
        position: of the guessed token in the target's sequence.
    """
    return keyed_choice(seed, position, draft, _DRAFT_STREAM)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A likely token at a position, with its log-probability in nats."""

    token: int
    log_prob: float


def alternatives(row: Row) -> tuple[Alternative, ...]:
    """The likeliest tokens of a row, as many as were requested."""
    if row.top_tokens is None or row.top_log_probs is None:
        return ()
    pairs = zip(row.top_tokens.tolist(), row.top_log_probs.tolist(), strict=True)
    return tuple(Alternative(token, log_prob) for token, log_prob in pairs)


@dataclass(frozen=True, slots=True)
class Described:
    """A token's log-probability and the likeliest alternatives there."""

    log_prob: float | None = None
    alternatives: tuple[Alternative, ...] = ()


@dataclass
class Target:
    """The target during one decoding: which outputs to request for its rows, and the processors' state.

    Args:
        session: the sequence.
        sampling: how tokens are drawn.
        log_probs: ``None``, or how many alternatives to describe beside each token.
        processors: the caller's own logits processors.
        needs: what the acceptance rule reads.
        extra: what the drafter reads.
    """

    session: Session
    sampling: SamplingParams
    log_probs: int | None
    processors: Sequence[LogitsProcessor]
    needs: RowNeeds
    extra: Outputs
    outputs: Outputs = field(init=False)

    def __post_init__(self) -> None:
        self._chain = build_processors(self.sampling, self.processors)
        self._state = self._chain.start(self.session.tokens)
        plain = self.sampling.greedy and not self._chain.processors
        wanted = 0 if self.log_probs is None else max(self.log_probs, 1)
        # A greedy draw needs no logits, and its log-probability is the first of the top ones.
        self.outputs = replace(
            self.extra,
            argmax=plain or self.extra.argmax,
            top_k=max(wanted, self.needs.top_k, self.extra.top_k),
            logits=not plain or self.needs.logits or self.extra.logits,
        )

    def view(self, tree: DraftTree, rows: Sequence[Row]) -> TargetView:
        """The target's view of a tree that was just scored."""
        return TargetView(tree, rows, self.sampling, self._chain, self._state, len(self.session))

    def advance(self, tokens: Sequence[int]) -> None:
        """Move the processors' state past the committed tokens."""
        if self._chain.processors:
            for token in tokens:
                self._state = self._chain.advance(self._state, token)

    def describe(self, row: Row, token: int) -> Described:
        """What the caller asked to know about a token that follows a row."""
        if self.log_probs is None:
            return Described()
        top = alternatives(row)
        log_prob = next((other.log_prob for other in top if other.token == token), None)
        if log_prob is None:
            assert row.logits is not None
            log_prob = float(log_softmax(np.asarray(row.logits))[token])
        return Described(log_prob, top[: self.log_probs])
