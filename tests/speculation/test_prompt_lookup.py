"""Prompt lookup: the choice of transformers, at a price that does not grow with the text."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.engine.executor import run
from specrag.engine.session import Session
from specrag.errors import InputError
from specrag.models.toy import ToyModel
from specrag.speculation.drafters.prompt_lookup import LOOKUP, PromptLookup
from specrag.speculation.tree import DraftTree

MODEL = ToyModel()


def proposal(drafter: PromptLookup, tokens: Sequence[int], budget: int = 60) -> DraftTree:
    return run(drafter.propose(Session(MODEL, tokens=tokens), budget))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.integers(1, 4), st.integers(1, 6))
def test_it_copies_what_transformers_copies(tokens: list[int], ngram_max: int, max_tokens: int) -> None:
    import torch
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    theirs = PromptLookupCandidateGenerator(
        num_output_tokens=max_tokens, max_matching_ngram_size=ngram_max, max_length=1000
    )
    expected = theirs.get_candidates(torch.tensor([tokens]))[0][0, len(tokens) :].tolist()
    tree = proposal(PromptLookup(ngram_max, max_tokens), tokens)
    assert tree.tokens == tuple(expected)
    assert tree == DraftTree.chain(expected, LOOKUP, tree.grades)


def test_the_longest_match_wins_then_the_earliest() -> None:
    #         earliest of 2 3    1 2 3            of 2 3 again
    tokens = [2, 3, 7, 7, 7, 9, 1, 2, 3, 8, 8, 8, 2, 3, 6, 1, 2, 3]
    assert proposal(PromptLookup(3, 4), tokens).tokens == (8, 8, 8, 2)
    assert proposal(PromptLookup(2, 4), tokens).tokens == (7, 7, 7, 9)
    assert proposal(PromptLookup(2, 4), tokens, budget=2).tokens == (7, 7)


def test_the_copy_ends_with_the_text() -> None:
    assert proposal(PromptLookup(1), [5, 1, 2, 5]).tokens == (1, 2, 5)
    assert proposal(PromptLookup(), [4, 4, 4, 4]).tokens == (4,)
    assert proposal(PromptLookup(), [1, 2, 3]).tokens == ()
    assert proposal(PromptLookup(), [1]).tokens == ()


def test_grades_count_the_tokens_that_agree() -> None:
    tree = proposal(PromptLookup(3), [1, 2, 3, 4, 5, 9, 2, 3])
    assert tree.tokens == (4, 5, 9, 2, 3)
    assert tree.grades == (2, 3, 4, 5, 6)


def test_a_token_taken_back_was_never_seen() -> None:
    drafter = PromptLookup(2)
    assert proposal(drafter, [1, 2, 3, 9, 1, 2]).tokens == (3, 9, 1, 2)
    drafter.truncate(2)
    # Now 1 2 is first followed by 5.
    assert proposal(drafter, [1, 2, 5, 9, 1, 2]).tokens == (5, 9, 1, 2)


@pytest.mark.parametrize(("ngram_max", "max_tokens"), [(0, 10), (3, 0), (True, 10), (3, 2.5)])
def test_wrong_numbers_are_refused(ngram_max: int, max_tokens: int) -> None:
    with pytest.raises(InputError, match="at least 1"):
        PromptLookup(ngram_max, max_tokens)


def test_a_proposal_does_not_read_the_text_again() -> None:
    drafter = PromptLookup()
    session = Session(MODEL, tokens=[number % 997 for number in range(100_000)])
    run(drafter.start(session, ()))
    fastest = 1.0
    for token in range(30):
        session.tokens.append(token)
        began = time.perf_counter()
        with pytest.raises(StopIteration) as found:
            next(drafter.propose(session, 10))
        fastest = min(fastest, time.perf_counter() - began)
        assert len(found.value.value) == 10
    # It takes about 15 microseconds; to read 100,000 tokens, a thousand at least.
    assert fastest < 300e-6
