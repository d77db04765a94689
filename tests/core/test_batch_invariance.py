"""``batch_invariant``: a row's bits do not depend on what else is in its pass, nor on the session's past.

The reference is plain decoding: the context fed at once, then one token a pass, alone. Everything else must give
the same bits: ``np.array_equal`` of whole logits vectors, on the real model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from specrag.engine.executor import run
from specrag.engine.outputs import LOGITS
from specrag.engine.passes import gather
from specrag.engine.sampling_params import SamplingParams
from specrag.engine.session import Session
from specrag.engine.stopping import StopConditions
from specrag.models.loading import LoadedModel, load_model
from specrag.models.tokenizer import TextStream
from specrag.speculation.decode import Settings
from specrag.speculation.drafters.base import NoDrafter
from specrag.speculation.tree import EMPTY, DraftTree
from tests.processor import PACKED_BF16
from tests.speculation.guessing import Budgets, RandomDrafter, decoding, random_tree

pytestmark = PACKED_BF16

SENTENCE = (
    "The river rose in the night, and by the morning the lower fields lay under a brown sheet of water. "
)
CONTEXTS = {"short": 37, "long": 1_100}
CHAIN = 64


@dataclass
class Behind:
    """A context, a continuation of it, and the bits of plain decoding along the continuation."""

    loaded: LoadedModel
    context: list[int]
    continuation: list[int]
    reference: list[np.ndarray]  # after the context, then after each token of the continuation

    prefilled: Session

    def session(self) -> Session:
        """A session behind the context; its cache is a copy, made at its first pass."""
        return self.prefilled.fork()

    def along(self, tokens: Sequence[int]) -> list[np.ndarray]:
        """Plain decoding's bits after each of these tokens behind the context."""
        session = self.session()
        found = [next_bits(session)]
        for token in tokens:
            session.commit((), token)
            found.append(next_bits(session))
        return found[1:]


def next_bits(session: Session) -> np.ndarray:
    logits = run(session.score(EMPTY, LOGITS))[0].logits
    assert logits is not None
    return logits


def check(rows: Sequence[np.ndarray | None], reference: Sequence[np.ndarray], where: object) -> None:
    for place, (row, wanted) in enumerate(zip(rows, reference, strict=True)):
        assert row is not None
        difference = float(np.abs(row - wanted).max())
        assert np.array_equal(row, wanted), f"{where}, row {place}: logits differ by {difference:.3g}"


@cache
def model(dtype: str) -> LoadedModel:
    weights, _, kept = dtype.partition(", keys and values ")
    return load_model(
        "smollm2-135m", dtype=weights, device="cpu", batch_invariant=True, kv_dtype=kept or "auto"
    )


@cache
def make_behind(dtype: str, length: int) -> Behind:
    loaded = model(dtype)
    tokens = loaded.tokenizer.encode(SENTENCE * (length // 20 + 8), special=False)
    rng = random.Random(length)
    # Half of the text is repeated, half is noise: both flat and peaked distributions.
    tokens = [token if rng.random() < 0.9 else rng.randrange(1_000, 40_000) for token in tokens]
    prefilled = Session(loaded.model)
    run(prefilled.extend(tokens[:length]))
    behind = Behind(loaded, tokens[:length], tokens[length : length + CHAIN], [], prefilled)
    # Not by a fork: the reference has no past.
    session = Session(loaded.model)
    run(session.extend(behind.context))
    behind.reference.append(next_bits(session))
    for token in behind.continuation:
        session.commit((), token)
        behind.reference.append(next_bits(session))
    return behind


@pytest.fixture(params=["bf16", "int8", "bf16, keys and values int8"])
def dtype(request: pytest.FixtureRequest, smollm2: object) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=CONTEXTS)
def behind(request: pytest.FixtureRequest, dtype: str) -> Behind:
    return make_behind(dtype, CONTEXTS[request.param])


def test_in_chains_of_any_length(behind: Behind) -> None:
    session = behind.session()
    for rows in [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63]:
        tree = DraftTree.chain(behind.continuation[:rows], "chain")
        scored = run(session.score(tree, LOGITS))
        check([row.logits for row in scored], behind.reference[: rows + 1], f"chain of {rows + 1} rows")


@pytest.mark.parametrize("seed", range(3))
def test_as_a_node_of_a_tree(behind: Behind, seed: int) -> None:
    rng = random.Random(seed)
    small = random_tree(rng, (8, 14, 40)[seed], 6)
    # The tokens of the first levels come from the continuation, so that trees hold likely and unlikely tokens.
    tokens = tuple(behind.continuation[token] if token < 4 else token * 997 + 100 for token in small.tokens)
    tree = DraftTree(tokens, small.parents, small.sources)
    session = behind.session()
    rows = run(session.score(tree, LOGITS))
    check([rows[0].logits], behind.reference[:1], "root")
    known: dict[tuple[int, ...], np.ndarray] = {}
    leaves = sorted(set(range(len(tree))) - set(tree.parents))
    for leaf in leaves[:8]:
        path = [leaf]
        while tree.parents[path[-1]] >= 0:
            path.append(tree.parents[path[-1]])
        path.reverse()
        along = behind.along([tree.tokens[node] for node in path])
        check([rows[1 + node].logits for node in path], along, f"path {path} of {len(tree)} nodes")
        known |= {tuple(path[: i + 1]): bits for i, bits in enumerate(along)}
    assert len(known) > 4


def test_packed_with_other_sessions(behind: Behind) -> None:
    others = [behind.session(), *(Session(behind.loaded.model) for _ in range(4))]
    for length, other in zip((1, 33, 64, 200), others[1:], strict=True):
        run(other.extend(behind.context[-length:] if length < 37 else (behind.continuation * 4)[:length]))
    mine = behind.session()
    chain = DraftTree.chain(behind.continuation[:5], "chain")
    trees = [EMPTY, EMPTY, chain, random_tree(random.Random(2), 9, 500), EMPTY]
    for tree, rows in ((EMPTY, 1), (chain, 6)):
        for where in (0, 2, 5):
            sessions = [*others[:where], mine, *others[where:]]
            asked = [*trees[:where], tree, *trees[where:]]
            pairs = zip(sessions, asked, strict=True)
            scored = run(gather([session.score(guess, LOGITS) for session, guess in pairs]))
            check([row.logits for row in scored[where]], behind.reference[:rows], f"place {where} of 6")


@pytest.mark.parametrize("chunk", [7, 64, 500, 512])
def test_after_a_prefill_in_other_chunks(behind: Behind, chunk: int) -> None:
    session = Session(behind.loaded.model)
    # Small chunks only around position 1,024, where oneDNN's sums change their order; elsewhere they take long.
    far = chunk == 7 and len(behind.context) > 1_060
    before, after = (behind.context[:980], behind.context[1_060:]) if far else ([], [])
    between = behind.context[len(before) : len(behind.context) - len(after)]
    run(session.extend(before))
    run(session.extend(between, chunk=chunk))
    run(session.extend(after))
    check([next_bits(session)], behind.reference[:1], f"chunks of {chunk}")


def test_after_prefilling_what_was_decoded(behind: Behind) -> None:
    """The tokens of an answer become part of the next prompt."""
    session = Session(behind.loaded.model)
    run(session.extend([*behind.context, *behind.continuation]))
    check([next_bits(session)], behind.reference[-1:], "prefilled continuation")


def test_after_a_fork(behind: Behind) -> None:
    parent = behind.session()
    run(parent.extend(behind.continuation[:20]))
    child, shorter = parent.fork(), parent.fork(len(behind.context) + 5)
    check([next_bits(child)], [behind.reference[20]], "fork")
    check([next_bits(shorter)], [behind.reference[5]], "shorter fork")
    check([next_bits(parent)], [behind.reference[20]], "parent")
    # The parent goes back below its forks and writes there, at once and in the same pass as they.
    parent.truncate(len(behind.context))
    chain = DraftTree.chain(behind.continuation[:3], "chain")
    mine, theirs = run(gather([parent.score(chain, LOGITS), child.fork().score(EMPTY, LOGITS)]))
    check([row.logits for row in mine], behind.reference[:4], "parent behind a cut below its fork")
    check([theirs[0].logits], [behind.reference[20]], "fork of the fork")


def test_after_commits_of_tree_paths(behind: Behind) -> None:
    """The right path lies scattered among wrong guesses."""
    session = behind.session()
    done = 0
    rng = random.Random(5)
    while done < 40:
        tokens: list[int] = []
        parents: list[int] = []
        path: list[int] = []
        for token in behind.continuation[done : done + 5]:
            last = path[-1] if path else -1
            for _ in range(rng.randint(0, 2)):
                tokens.append(rng.randrange(40_000, 49_000))
                parents.append(last)
            tokens.append(token)
            parents.append(last)
            path.append(len(tokens) - 1)
        tree = DraftTree(tuple(tokens), tuple(parents), ("x",) * len(tokens))
        rows = run(session.score(tree, LOGITS))
        wanted = behind.reference[done : done + 6]
        check([rows[0].logits, *(rows[1 + node].logits for node in path)], wanted, f"tree behind {done}")
        kept = rng.randint(0, 5)
        session.commit(path[:kept], behind.continuation[done + kept])
        done += kept + 1
    check([next_bits(session)], [behind.reference[done]], "after the commits")


def test_after_a_cut(behind: Behind) -> None:
    session = behind.session()
    run(session.extend(behind.continuation))
    for length in (50, 33, 8, 0):
        session.truncate(len(behind.context) + length)
        check([next_bits(session)], [behind.reference[length]], f"cut to {length}")
    run(session.extend(behind.continuation[:30]))
    check([next_bits(session)], [behind.reference[30]], "fed again")


# --- whole texts ---------------------------------------------------------------------------------------------

PROMPTS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Count from one to twenty.",
    "Explain why the sky is blue, in two sentences.",
    "List five fruits and five vegetables.",
    "Translate to German: good morning, my friend.",
    "def fibonacci(n):",
    "Summarise: " + SENTENCE * 6,
    "Tell me a story about a fox who could not sleep.",
    "Repeat after me: one potato, two potato, three potato, four.",
]


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=0.8, top_p=0.95, seed=11)],
    ids=["greedy", "sampled"],
)
def test_speculation_gives_plain_decodings_text(dtype: str, sampling: SamplingParams) -> None:
    loaded = model(dtype)
    prompts = [loaded.tokenizer.chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    settings = Settings(StopConditions(24, loaded.tokenizer.eos_tokens), sampling)
    text: Callable[[], TextStream] = lambda: TextStream(loaded.tokenizer)  # noqa: E731
    plain = [
        run(decoding(loaded.model, prompt, settings, NoDrafter(), Budgets([0]), text())) for prompt in prompts
    ]
    drafters = [
        RandomDrafter(number, loaded.model.vocab_size, output.tokens) for number, output in enumerate(plain)
    ]
    guessed = run(
        gather(
            [
                decoding(loaded.model, prompt, settings, drafter, Budgets([9, 3, 16]), text())
                for prompt, drafter in zip(prompts, drafters, strict=True)
            ]
        )
    )
    equal = [one.tokens == other.tokens for one, other in zip(plain, guessed, strict=True)]
    assert equal == [True] * len(PROMPTS)
    assert [one.text for one in plain] == [other.text for other in guessed]
    assert sum(step.accepted for output in guessed for step in output.steps) > 40
