"""Drafters, texts and an independent plain decoding for the tests of the loop on the toy model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specrag.engine.outputs import NOTHING, Outputs, Row
from specrag.engine.passes import Coroutine, Emit, SessionModel
from specrag.engine.processors import LogitsProcessor, build_processors
from specrag.engine.sampling import choose
from specrag.engine.sampling_params import SamplingParams
from specrag.engine.session import Session
from specrag.engine.stopping import FinishReason
from specrag.models.toy import ToyModel
from specrag.speculation.acceptance import Matching, Rule
from specrag.speculation.decode import Settings, Speculation, Step, TextSink, decode
from specrag.speculation.drafters.base import ANY_DEPTH, Drafter
from specrag.speculation.schedule.base import Timed, TokenSchedule
from specrag.speculation.tree import EMPTY, ROOT, DraftTree, Round


def random_tree(
    rng: random.Random, budget: int, vocab_size: int, likely: Sequence[int] = (), most: int = ANY_DEPTH
) -> DraftTree:
    """A random tree of at most ``budget`` nodes and ``most`` levels.

    The tokens of ``likely`` come often, as a chain.
    """
    tokens: list[int] = []
    parents: list[int] = []
    sources: list[str] = []
    depths: list[int] = []
    used: set[tuple[int, int]] = set()
    for _ in range(budget):
        node = len(tokens)
        parent = rng.randint(ROOT, node - 1) if rng.random() < 0.5 else node - 1
        depth = 0 if parent == ROOT else depths[parent] + 1
        guess = likely[depth] if depth < len(likely) and rng.random() < 0.6 else rng.randrange(vocab_size)
        if (parent, guess) in used or depth >= most:
            continue
        used.add((parent, guess))
        tokens.append(guess)
        parents.append(parent)
        sources.append(rng.choice(("left", "right")))
        depths.append(depth)
    return DraftTree(tuple(tokens), tuple(parents), tuple(sources))


@dataclass
class RandomDrafter:
    """Random trees, partly right where ``answer`` tells the true output; notes everything that it is told."""

    seed: int
    vocab_size: int
    answer: Sequence[int] = ()
    outputs: Outputs = NOTHING
    runs_passes: bool = False
    prompt_length: int = -1
    prompt_rows: list[Row] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    proposed: list[DraftTree] = field(default_factory=list)
    closed: int = 0

    def start(self, session: Session, rows: Sequence[Row]) -> Coroutine[None]:
        self._rng = random.Random(self.seed)
        self.prompt_length = len(session)
        self.prompt_rows = list(rows)
        yield from ()

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        yield from ()
        likely = self.answer[len(session) - self.prompt_length :]
        self.proposed.append(
            random_tree(self._rng, self._rng.randint(0, budget), self.vocab_size, likely, depth)
        )
        return self.proposed[-1]

    def observe(self, round: Round) -> None:
        assert not self.closed
        self.rounds.append(round)

    def truncate(self, length: int) -> None:
        raise AssertionError("the loop takes nothing back")

    def fork(self) -> RandomDrafter:
        raise AssertionError("the loop does not fork")

    def close(self) -> None:
        self.closed += 1


@dataclass
class OracleDrafter(RandomDrafter):
    """Always right."""

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        yield from ()
        start = len(session) - self.prompt_length
        self.proposed.append(DraftTree.chain(self.answer[start : start + min(budget, depth)], "oracle"))
        return self.proposed[-1]


class SilentDrafter(RandomDrafter):
    """Has a budget and proposes nothing."""

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        yield from ()
        self.proposed.append(EMPTY)
        return EMPTY


class Letters:
    """The text of the toy's tokens: a letter, or several, for each; ``lag`` characters come late, as bytes do."""

    def __init__(self, lag: int = 0) -> None:
        self._lag = lag
        self._held = ""

    @staticmethod
    def of(tokens: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token) * (1 + token % 2) for token in tokens)

    def push(self, token: int) -> str:
        text = self._held + self.of([token])
        cut = max(len(text) - self._lag, 0)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        return self._held


class Budgets:
    """A schedule that changes its mind, verifies all of a proposal, and notes what it is told."""

    def __init__(self, budgets: Sequence[int]) -> None:
        self._budgets = list(budgets)
        self.asked: list[bool] = []
        self.contexts: list[int] = []
        self.told: list[tuple[Round, Timed]] = []

    def budget(self, *, runs_passes: bool) -> int:
        self.asked.append(runs_passes)
        return self._budgets[len(self.told) % len(self._budgets)]

    def choose(self, tree: DraftTree, context: int) -> DraftTree:
        self.contexts.append(context)
        return tree

    def observe(self, round: Round, timed: Timed) -> None:
        self.told.append((round, timed))


class PruningBudgets(Budgets):
    """Verifies a part of a proposal, a function of it that looks random: a node goes with its descendants."""

    def __init__(self, budgets: Sequence[int], seed: int, share: float = 0.75) -> None:
        super().__init__(budgets)
        self._seed = seed
        self._share = share
        self.pruned = 0

    def choose(self, tree: DraftTree, context: int) -> DraftTree:
        tree = super().choose(tree, context)
        rng = random.Random(f"{self._seed}/{context}/{tree.tokens}")
        kept: list[int] = []
        for node, parent in enumerate(tree.parents):
            if (parent == ROOT or parent in kept) and rng.random() < self._share:
                kept.append(node)
        self.pruned += len(tree) - len(kept)
        return tree.kept(kept)


@dataclass
class Decoded:
    """All that came of one decoding."""

    session: Session
    steps: list[Step]
    reason: FinishReason
    final_tokens: list[int]

    @property
    def tokens(self) -> list[int]:
        return [token.token for step in self.steps for token in step.tokens]

    @property
    def text(self) -> str:
        return "".join(step.text for step in self.steps)


def decoding(
    model: SessionModel,
    prompt: Sequence[int],
    settings: Settings,
    drafter: Drafter,
    schedule: TokenSchedule,
    text: TextSink | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    rule: Rule | None = None,
) -> Coroutine[Decoded]:
    """Prefill and decode, by matching unless told otherwise; its emissions are noted and passed on."""
    session = Session(model)
    rows = yield from session.extend(prompt, drafter.outputs)
    speculation = Speculation(drafter, Matching() if rule is None else rule, schedule)
    inner = decode(session, settings, Letters() if text is None else text, speculation, clock, rows)
    steps: list[Step] = []
    answer = None
    while True:
        try:
            request = inner.send(answer)
        except StopIteration as stop:
            return Decoded(session, steps, stop.value, list(session.tokens))
        if isinstance(request, Emit):
            steps.append(request.value)
        answer = yield request


@dataclass(frozen=True)
class Expected:
    """What plain decoding gives, by the plainest possible loop."""

    tokens: list[int]
    text: str
    reason: FinishReason
    log_probs: list[float]


def plain_decoding(
    model: ToyModel,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    sampling: SamplingParams,
    stop_tokens: frozenset[int] = frozenset(),
    stop_strings: tuple[str, ...] = (),
    processors: Sequence[LogitsProcessor] = (),
) -> Expected:
    """Token by token over the toy's own table: no session, no cache, no executor, no stop checker."""
    chain = build_processors(sampling, processors)
    tokens = list(prompt)
    log_probs: list[float] = []
    while True:
        output = tokens[len(prompt) :]
        logits = model.logits(tokens)
        state = chain.start(prompt)
        for token in output:
            state = chain.advance(state, token)
        token = choose(chain.apply(logits, state), sampling, len(tokens))
        exact = logits.astype(np.float64)
        log_probs.append(float(exact[token] - np.logaddexp.reduce(exact)))
        tokens.append(token)
        output.append(token)
        if token in stop_tokens:
            return Expected(output, Letters.of(output[:-1]), "stop", log_probs)
        shown = Letters.of(output)
        ends = [
            (shown.find(string) + len(string), shown.find(string))
            for string in stop_strings
            if string in shown
        ]
        if ends:
            return Expected(output, shown[: min(ends)[1]], "stop", log_probs)
        if len(output) >= max_tokens or len(tokens) > model.context_length:
            return Expected(output, shown, "length", log_probs)
