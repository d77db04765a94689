"""A draft model: its session follows the target's, its guesses are its own model's, its vocabulary is checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from specrag.engine.executor import run
from specrag.engine.sampling_params import SamplingParams
from specrag.engine.session import Session
from specrag.engine.stopping import StopConditions
from specrag.errors import InputError
from specrag.models.toy import ToyModel
from specrag.speculation.decode import Settings
from specrag.speculation.drafters.draft_model import DRAFT_MODEL, DraftModel, check_same_vocabulary
from specrag.speculation.tree import DraftTree
from tests.speculation.guessing import Budgets, decoding

PROMPT = [1, 2, 3, 4]


def toy(seed: int = 0, context_length: int = 512, vocab_size: int = 6) -> ToyModel:
    return ToyModel(vocab_size=vocab_size, order=2, scale=1.5, seed=seed, context_length=context_length)


def greedy(model: ToyModel, tokens: Sequence[int], count: int) -> list[int]:
    found = list(tokens)
    for _ in range(count):
        found.append(int(model.logits(found).argmax()))
    return found[len(tokens) :]


def session_of(tokens: Sequence[int], model: ToyModel | None = None) -> Session:
    return Session(toy() if model is None else model, tokens=tokens)


def propose(drafter: DraftModel, tokens: Sequence[int], budget: int) -> DraftTree:
    return run(drafter.propose(session_of(tokens), budget))


# -- what it proposes -----------------------------------------------------------------------------------------


def test_it_proposes_its_models_own_text() -> None:
    drafter = DraftModel(toy(1), max_tokens=7)
    tree = propose(drafter, PROMPT, 20)
    assert tree.tokens == tuple(greedy(toy(1), PROMPT, 7))
    assert set(tree.sources) == {DRAFT_MODEL}
    # Whatever part of it the target kept, and whatever else it said.
    for said in ([*tree.tokens[:3], 5], [0], list(tree.tokens), [5, 4, 3, 2, 1, 0] * 8):
        follow = [*PROMPT, *said]
        assert propose(drafter.fork(), follow, 4).tokens == tuple(greedy(toy(1), follow, 4))


def test_each_guess_costs_one_pass_and_catching_up_none() -> None:
    model = toy(1)
    drafter = DraftModel(model)
    session = session_of(PROMPT)
    run(drafter.start(session, ()))
    passes = [model.passes]
    assert passes == [1]
    for kept in (5, 2, 0):
        tree = run(drafter.propose(session, 5))
        assert len(tree) == 5
        passes.append(model.passes)
        session.tokens += [*tree.tokens[:kept], (tree.tokens[kept - 1] + 1) % 6]
    assert np.diff(passes).tolist() == [5, 5, 5]


def test_grades_follow_the_models_confidence() -> None:
    model = toy(1)
    tokens = tuple(greedy(model, PROMPT, 10))
    logits = [model.logits([*PROMPT, *tokens[:count]]) for count in range(10)]
    confidences = [float(np.exp(row - row.max()).sum() ** -1) for row in logits]
    grades = propose(DraftModel(model), PROMPT, 10).grades
    order = np.argsort(confidences)
    assert sorted(grades) == [grades[place] for place in order]
    assert len(set(grades)) > 1


def test_it_stops_where_its_context_ends() -> None:
    drafter = DraftModel(toy(1, context_length=10))
    for length, count in ((4, 7), (9, 2), (10, 1), (11, 0), (30, 0), (8, 3)):
        drafter.truncate(min(length, 8))
        tokens = ([1, 2, 3, 4, 5] * 6)[:length]
        run(drafter.start(session_of(tokens), ()))
        assert propose(drafter, tokens, 20).tokens == tuple(greedy(toy(1), tokens, count))


def test_tokens_that_only_the_target_has_end_its_work() -> None:
    drafter = DraftModel(toy(1, vocab_size=4))
    assert len(propose(drafter, [1, 2, 3], 5)) == 5
    assert len(propose(drafter, [1, 2, 3, 4], 5)) == 0
    drafter.truncate(3)
    assert len(propose(drafter, [1, 2, 3, 3], 5)) == 5


@pytest.mark.parametrize("max_tokens", [0, True])
def test_wrong_values_are_refused(max_tokens: int) -> None:
    with pytest.raises(InputError):
        DraftModel(toy(), max_tokens)


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    model = toy()
    wanted = Settings(StopConditions(30), SamplingParams())
    text = run(decoding(model, PROMPT, wanted, DraftModel(model), Budgets([5])))
    assert text.tokens == greedy(model, PROMPT, 30)
    assert len(text.steps) == 5
    assert sum(step.accepted for step in text.steps) == sum(step.drafted for step in text.steps) == 25


def test_closing_leaves_nothing_in_the_cache() -> None:
    drafter = DraftModel(toy())
    propose(drafter, PROMPT, 5)
    fork = drafter.fork()
    drafter.close()
    assert len(drafter._session) == drafter._session.cache.nbytes == 0
    assert propose(fork, PROMPT, 5).tokens == tuple(greedy(toy(), PROMPT, 5))


# -- vocabularies ---------------------------------------------------------------------------------------------


class Words:
    def __init__(self, *words: bytes) -> None:
        self._words = words

    @property
    def vocab_size(self) -> int:
        return len(self._words)

    def token_bytes(self, token: int) -> bytes:
        return self._words[token]


def test_vocabularies_are_compared_token_by_token() -> None:
    check_same_vocabulary(Words(b"a", b"b", b""), Words(b"a", b"b", b""))
    with pytest.raises(InputError, match=r"2 tokens where the target has 3.*family"):
        check_same_vocabulary(Words(b"a", b"b", b"c"), Words(b"a", b"b"))
    with pytest.raises(InputError, match=r"token 1 is b'c', the target's b'b'"):
        check_same_vocabulary(Words(b"a", b"b", b"c"), Words(b"a", b"c", b"b"))


def test_real_tokenizers_are_told_apart(smollm2: Path) -> None:
    from specrag.models import catalog
    from specrag.models.tokenizer import Tokenizer

    mine, again = (Tokenizer(catalog.resolve("smollm2-135m")) for _ in range(2))
    check_same_vocabulary(mine, again)
    other = Tokenizer(catalog.resolve("gemma-3-270m"))
    with pytest.raises(InputError, match="draft model"):
        check_same_vocabulary(mine, other)
