"""Drafting across vocabularies: the output is plain decoding's whatever the vocabularies, and guesses are not lost."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.engine.executor import run
from specrag.engine.passes import gather
from specrag.engine.sampling_params import SamplingParams
from specrag.engine.session import Session
from specrag.engine.stopping import StopConditions
from specrag.errors import InputError
from specrag.models.toy import ToyModel
from specrag.speculation.decode import Settings
from specrag.speculation.drafters.cross_vocabulary import CrossVocabulary
from specrag.speculation.drafters.draft_model import CONFIDENCES, DRAFT_MODEL
from specrag.speculation.tree import DraftTree
from specrag.speculation.vocabularies import VocabularyPair
from tests.speculation.guessing import Budgets, Decoded, PruningBudgets, decoding, plain_decoding
from tests.speculation.spelling import PAIRS, Reciting, Spelling, real_tokenizer

#: Both write "ab é"; neither has a token of every word that the other has. The last token ends a text.
TARGET_WORDS = Spelling(
    [b"a", b"b", b" ", b"ab", b" a", b"\xc3", b"\xa9", b"bb", b""], {"<end>": 8}, ends=[8]
)
DRAFT_WORDS = Spelling(
    [b"", b"", b"b", b"a", b" ", b"\xc3\xa9", b"ba", b" b", b"aab", b""],
    {"<s>": 0, "<stop>": 1, "<odd>": 9},
    ends=[1],
    front=[0],
)
TOY_PAIR = VocabularyPair(TARGET_WORDS, DRAFT_WORDS)
TEXT = "ab aab bé ab b aé éba aab ab bb é ba ab abab aab b"


def reciting_target(text: str = TEXT) -> Reciting:
    return Reciting(TARGET_WORDS, text, end=8, width=9)


def reciting_draft(text: str = TEXT, context_length: int = 4096) -> Reciting:
    return Reciting(DRAFT_WORDS, text, end=1, width=12, context_length=context_length)


def propose(drafter: CrossVocabulary, tokens: Sequence[int], budget: int, width: int = 9) -> DraftTree:
    return run(drafter.propose(Session(ToyModel(vocab_size=width), tokens=tokens), budget))


def rest_of(text: str, read: str) -> list[int]:
    assert text.startswith(read)
    return TOY_PAIR.target.encode(text[len(read) :])


# -- what it proposes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", ["a", "ab", "ab a", "ab aab b", TEXT[:-1], TEXT])
@pytest.mark.parametrize("budget", [1, 2, 5, 9])
def test_it_proposes_its_models_text_in_the_targets_tokens(read: str, budget: int) -> None:
    drafter = CrossVocabulary(reciting_draft(), TOY_PAIR)
    tree = propose(drafter, TOY_PAIR.target.encode(read), budget)
    expected = [*rest_of(TEXT, read), 8][:budget]
    # The last word may be cut short, where the draft model had not yet written all of it.
    assert list(tree.tokens[:-1]) == expected[: len(tree) - 1]
    spelled = TOY_PAIR.target.spelled(tree.tokens)
    assert TEXT[len(read) :].encode().startswith(spelled)
    assert len(tree) == len(expected)
    assert set(tree.sources) == {DRAFT_MODEL}


def test_half_a_character_is_completed() -> None:
    drafter = CrossVocabulary(reciting_draft(), TOY_PAIR)
    begun = [*TOY_PAIR.target.encode("ab aab b"), 5]
    assert propose(drafter, begun, 1).tokens == (6,)
    # Another half than the draft model expects: nothing that it could say goes on there.
    assert (
        propose(CrossVocabulary(reciting_draft(), TOY_PAIR), [*TOY_PAIR.target.encode("ab aab"), 5], 4)
        == DraftTree()
    )


def test_half_a_character_is_not_proposed() -> None:
    half = Spelling([b"a", b"\xc3", b"\xa9"])
    pair = VocabularyPair(TARGET_WORDS, half)
    model = Reciting(half, "a\u00e9a", end=3, width=4)
    for most, expected in ((1, ()), (2, (5, 6)), (3, (5, 6, 0))):
        assert propose(CrossVocabulary(model, pair, max_tokens=most), [0], 9).tokens == expected


def test_the_end_of_a_text_is_proposed_and_other_special_tokens_are_not() -> None:
    end = CrossVocabulary(reciting_draft(), TOY_PAIR)
    assert propose(end, TOY_PAIR.target.encode(TEXT), 5).tokens == (8,)
    for token in (9, 0, 11):  # special ones, and a column that pads the logits
        odd = CrossVocabulary(Reciting(DRAFT_WORDS, TEXT, end=token, width=12), TOY_PAIR)
        assert propose(odd, TOY_PAIR.target.encode(TEXT[:-1]), 5).tokens == (1,)
        assert propose(odd, TOY_PAIR.target.encode(TEXT), 5) == DraftTree()


def test_each_guess_costs_one_pass_and_catching_up_none() -> None:
    long = Spelling([b"a", b"b", b"abbabb"])
    short = Spelling([b"a", b"b"])
    model = Reciting(short, "abbabb" * 9, end=2, width=3)
    drafter = CrossVocabulary(model, VocabularyPair(long, short))
    run(drafter.start(Session(ToyModel(vocab_size=3), tokens=[2]), ()))
    assert (model.passes, model.rows) == (1, 5)  # the newest of six tokens is fed with the first guess
    assert propose(drafter, [2], 1, width=3).tokens == (0,)
    assert (model.passes, model.rows) == (2, 6)
    # The guess was right, and eleven more tokens came: they are fed with the next guess.
    assert propose(drafter, [2, 2, 2], 2, width=3).tokens == (0, 1)
    assert (model.passes, model.rows) == (4, 6 + 12 + 1)
    # Neither guess was right: they are taken back, and the token in front of them is fed again.
    assert propose(drafter, [2, 2, 2, 1], 1, width=3) == DraftTree()
    assert (model.passes, model.rows) == (5, 19 + 2)


def test_grades_tell_the_confidence_and_the_last_token() -> None:
    surest = len(CONFIDENCES)
    drafter = CrossVocabulary(reciting_draft(), TOY_PAIR)
    tree = propose(drafter, TOY_PAIR.target.encode("ab"), 6)
    assert tree.grades == (*[surest] * (len(tree) - 1), 2 * surest + 1)
    ended = propose(drafter, TOY_PAIR.target.encode(TEXT[:-1]), 6)
    assert ended.tokens[-1] == 8
    assert set(ended.grades) == {surest}


def test_a_token_is_as_sure_as_the_guesses_that_begin_in_it() -> None:
    """Drafted are "b" (0.5), "a b" (0.7) and "a" (0.9): in the target's tokens "ba", " ", "ba"."""
    pair = VocabularyPair(Spelling([b"a", b"b", b" ", b"ba"]), Spelling([b"a", b"b", b"a b"]))
    model = ToyModel(vocab_size=3, order=1)
    for before, (guess, chance) in enumerate(((1, 0.5), (2, 0.7), (0, 0.9))):
        other = (1.0 - chance) / 2
        row = np.full(3, np.log(other))
        row[guess] = np.log(chance)
        model.table[(0, 1, 2)[before]] = row
    drafter = CrossVocabulary(model, pair, max_tokens=3)
    tree = propose(drafter, [0], 9, width=4)
    assert tree.tokens == (3, 2, 3)
    classes = [bisect(CONFIDENCES, chance) for chance in (0.5 * 0.7, 1.0, 0.9)]
    assert tree.grades == (classes[0], classes[1], classes[2] + len(CONFIDENCES) + 1)


def test_a_draft_ends_behind_an_unsure_token() -> None:
    model = ToyModel(vocab_size=9, order=2, scale=1.0, seed=1)
    tokens = TOY_PAIR.target.encode("ab a")
    unsure = CrossVocabulary(model, TOY_PAIR, min_confidence=1.0)
    before = model.passes
    propose(unsure, tokens, 9)
    assert model.passes - before <= 2  # the beginning, then one guess


def test_it_stops_where_its_context_ends() -> None:
    words = DRAFT_WORDS
    assert len(TOY_PAIR.front) == 1
    read = TOY_PAIR.target.encode("ab aab")
    used = 1 + len(TOY_PAIR.draft.encode("ab aab"))
    for context, most in ((used - 1, 0), (used, 1), (used + 1, 2), (used + 40, 12)):
        model = Reciting(words, TEXT, end=1, width=12, context_length=context)
        drafter = CrossVocabulary(model, TOY_PAIR)
        run(drafter.start(Session(reciting_target(), tokens=read), ()))
        before = model.passes
        tree = propose(drafter, read, 12)
        assert model.passes - before <= most
        assert bool(len(tree)) == (most > 0)
        drafter.truncate(1)
        assert len(propose(drafter, [0], 1)) == 1


def test_tokens_beyond_a_models_logits_end_its_work() -> None:
    narrow = Reciting(DRAFT_WORDS, TEXT, end=1, width=12)
    narrow.table = narrow.table[:, :5]  # no column for some of the tokenizer's tokens
    assert propose(CrossVocabulary(narrow, TOY_PAIR), TOY_PAIR.target.encode("ab bé"), 4) == DraftTree()
    drafter = CrossVocabulary(reciting_draft(), TOY_PAIR)
    found = propose(drafter, TOY_PAIR.target.encode("ab aa"), 9, width=4).tokens
    assert 0 < len(found) < 9
    assert max(found) < 4


def test_an_empty_text_is_no_text() -> None:
    bare = VocabularyPair(TARGET_WORDS, Spelling([b"a"]))
    drafter = CrossVocabulary(ToyModel(vocab_size=1), bare)
    assert propose(drafter, [8], 4) == DraftTree()
    assert propose(drafter, [8, 5], 4) == DraftTree()


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 8), min_size=1, max_size=40),
    steps=st.lists(st.integers(1, 7), max_size=12),
)
def test_what_it_read_before_makes_no_difference(tokens: list[int], steps: list[int]) -> None:
    """A text read in pieces, with guesses taken back in between, is the text read at once."""
    draft = ToyModel(vocab_size=12, order=3, scale=3.0, seed=2)
    draft.table[..., [0, 1, 9, 10, 11]] = -20.0  # those that are no words would end it
    drafter, length = CrossVocabulary(draft, TOY_PAIR), 1
    for step in [0, *steps]:
        length = min(length + step, len(tokens))
        expected = propose(CrossVocabulary(draft, TOY_PAIR), tokens[:length], 4)
        assert propose(drafter, tokens[:length], 4) == expected


@pytest.mark.parametrize(("most", "confidence"), [(0, 0.0), (True, 0.0), (5, -0.1), (5, 1.1)])
def test_wrong_values_are_refused(most: int, confidence: float) -> None:
    with pytest.raises(InputError):
        CrossVocabulary(ToyModel(), TOY_PAIR, most, confidence)


def test_closing_leaves_nothing_in_the_cache() -> None:
    drafter = CrossVocabulary(reciting_draft(), TOY_PAIR)
    read = TOY_PAIR.target.encode("ab aab")
    found = propose(drafter, read, 5)
    fork = drafter.fork()
    drafter.close()
    assert len(drafter._session) == drafter._session.cache.nbytes == 0
    assert propose(fork, read, 5) == propose(drafter, read, 5) == found


# -- exactness ------------------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [b"a", b"b", b" ", b"ab", b" a", b"\xc3", b"\xa9", b"\xc3\xa9", b"ba", b"bb ", b"\xa9a", b""]
)
VOCABULARIES = st.lists(PIECES, min_size=2, max_size=8)
SAMPLINGS = st.sampled_from(
    [
        SamplingParams(),
        SamplingParams(temperature=0.8, top_p=0.95, seed=5),
        SamplingParams(temperature=1.3, seed=6),
    ]
)


@settings(max_examples=100, deadline=None)
@given(
    words=st.tuples(VOCABULARIES, VOCABULARIES),
    sampling=SAMPLINGS,
    seed=st.integers(0, 99),
    budgets=st.lists(st.integers(0, 9), min_size=1, max_size=4),
)
def test_the_output_is_plain_decodings_whatever_the_vocabularies(
    words: tuple[list[bytes], list[bytes]], sampling: SamplingParams, seed: int, budgets: list[int]
) -> None:
    """Random vocabularies with special tokens, pieces of characters and repeated words; random models."""
    theirs, mine = words
    # The last token of each ends a text, and the target's model has a column without a token.
    pair = VocabularyPair(
        Spelling([*theirs, b""], {"<end>": len(theirs)}, [len(theirs)]),
        Spelling([*mine, b""], {"<end>": len(mine)}, [len(mine)]),
    )
    target = ToyModel(vocab_size=len(theirs) + 2, order=2, scale=1.5, seed=seed)
    draft = ToyModel(vocab_size=len(mine) + 1, order=1, scale=2.0, seed=seed + 1, context_length=60)
    prompts = [[0], [1, 0, 1], [seed % len(theirs)] * 5]
    wanted = Settings(StopConditions(25), sampling)
    drafters = [CrossVocabulary(draft, pair, max_tokens=6) for _ in prompts]
    schedules = [Budgets(budgets), PruningBudgets(budgets, seed), Budgets([5])]
    texts: list[Decoded] = run(
        gather(
            [
                decoding(target, prompt, wanted, drafter, schedule)
                for prompt, drafter, schedule in zip(prompts, drafters, schedules, strict=True)
            ]
        )
    )
    for prompt, text in zip(prompts, texts, strict=True):
        assert text.tokens == plain_decoding(target, prompt, max_tokens=25, sampling=sampling).tokens


RECITED = (
    "The lighthouse on Gannet Rock was lit in 1887.\n\n\tIts lens - 3.5 m - wasn't \u201cturned\u201d by hand; "
    "caf\u00e9 \u6771\u4eac \U0001f5fc\U0001f468\u200d\U0001f680 def f(x):\n        return x**2  # done"
)


@pytest.mark.parametrize(("target_name", "draft_name"), PAIRS)
def test_models_that_know_the_same_text_agree(target_name: str, draft_name: str, smollm2: Path) -> None:
    """With real vocabularies: every guess is right but those cut short, and the end of the text is guessed too."""
    theirs, mine = real_tokenizer(target_name), real_tokenizer(draft_name)
    pair = VocabularyPair(theirs, mine)
    stop, end = next(iter(pair.ends.items()))
    target = Reciting(theirs, RECITED, end, theirs.vocab_size)
    draft = Reciting(mine, RECITED, stop, mine.vocab_size)
    prompt = pair.target.encode(RECITED)[:3]
    wanted = Settings(StopConditions(200, frozenset({end})), SamplingParams())
    text = run(decoding(target, prompt, wanted, CrossVocabulary(draft, pair), Budgets([6])))
    assert [*prompt, *text.tokens] == [*pair.target.encode(RECITED), end]
    assert text.reason == "stop"
    drafted = sum(step.drafted for step in text.steps)
    accepted = sum(step.accepted for step in text.steps)
    assert drafted - accepted <= 2 * len(text.steps)
    assert len(text.tokens) / len(text.steps) > 4
