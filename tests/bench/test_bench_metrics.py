"""Metrics agree with SQuAD's script; the bootstrap finds differences that are there and no others."""

from __future__ import annotations

import re
import string
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.bench.metrics import accuracy, contains_answer, normalize_answer, token_f1
from specrag.bench.statistics import paired_bootstrap
from specrag.errors import InputError

ascii_text = st.text(st.characters(max_codepoint=126, min_codepoint=32), max_size=30)
wordy = st.lists(
    st.sampled_from(["The", "a", "an", "cat", "Cat,", "dog", "U.S.", "42", "-"]), max_size=8
).map(" ".join)


def squad_normalize(text: str) -> str:
    """From SQuAD's official evaluation script, in its own order of steps."""
    text = text.lower()
    text = "".join(ch for ch in text if ch not in set(string.punctuation))
    text = re.sub(r"\b(a|an|the)\b", " ", text)
    return " ".join(text.split())


def squad_f1(prediction: str, truth: str) -> float:
    """From SQuAD 2.0's official evaluation script."""
    predicted, gold = squad_normalize(prediction).split(), squad_normalize(truth).split()
    if len(gold) == 0 or len(predicted) == 0:
        return float(gold == predicted)
    same = sum((Counter(gold) & Counter(predicted)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(predicted), same / len(gold)
    return 2 * precision * recall / (precision + recall)


@settings(deadline=None)
@given(response=ascii_text | wordy, gold=ascii_text | wordy)
def test_ascii_agrees_with_squads_script(response: str, gold: str) -> None:
    assert normalize_answer(response) == squad_normalize(response)
    assert token_f1(response, gold) == pytest.approx(squad_f1(response, gold))
    assert token_f1(response, [gold, response]) == 1.0


@settings(deadline=None)
@given(st.text(max_size=30))
def test_normalizing_ascii_or_not_never_leaves_surplus(text: str) -> None:
    normalized = normalize_answer(text)
    assert normalized == " ".join(normalized.split())
    assert not set(normalized) & set(string.punctuation)


def test_beyond_ascii() -> None:
    assert normalize_answer("\u201cBeyonce\u0301\u2019s\u201d\u2014the Album") == "beyonc\u00e9sthe album"
    assert normalize_answer("Beyonce\u0301") == normalize_answer("beyonc\u00e9")


def test_contains_answer() -> None:
    assert contains_answer("He was a politician, born in Paris.", ["film director", "Politician"])
    assert not contains_answer("Many politicians.", "politician")
    assert not contains_answer("He was an actor.", ["film director", "politician"])
    assert contains_answer("It is the United States.", "united states")
    assert not contains_answer("Anything at all", ["The", "?", ""])
    assert not contains_answer("", "x")


def test_an_answer_is_contained_as_whole_words() -> None:
    assert not contains_answer("Tulsa, Oklahoma", "LA")
    assert not contains_answer("It was 1918.", "19")
    assert contains_answer("He lives in LA.", "LA")
    assert contains_answer("Marie Curie's discovery", "Marie Curie")
    assert contains_answer("a Paris-based firm", "Paris")
    assert contains_answer("in the U.S. Senate", "US")
    assert contains_answer("a jack-o'-lantern", "Jack O Lantern")


def test_a_lone_gold_answer_is_not_taken_apart_into_letters() -> None:
    assert not contains_answer("a b c", "bx")
    assert token_f1("b", "bx") == 0.0


def test_missing_gold_answers_are_an_error() -> None:
    for metric in (contains_answer, token_f1):
        with pytest.raises(InputError, match="gold"):
            metric("x", [])


def test_accuracy() -> None:
    assert accuracy([True, False, True, True]) == 0.75
    assert accuracy(iter([0.5, 1.0])) == 0.75
    with pytest.raises(InputError, match="correct"):
        accuracy([])


def test_bootstrap_of_equal_methods_sees_nothing() -> None:
    scores = [0.0, 1.0, 1.0, 0.3]
    result = paired_bootstrap(scores, scores)
    assert (result.difference, result.low, result.high) == (0.0, 0.0, 0.0)


def test_bootstrap_agrees_with_theory() -> None:
    generator = np.random.default_rng(1)
    b = generator.normal(size=400)
    a = b + generator.normal(0.1, 1.0, size=400)
    result = paired_bootstrap(a.tolist(), b.tolist())
    difference = a - b
    error = difference.std() / 20
    assert result.difference == pytest.approx(difference.mean())
    assert result.low == pytest.approx(difference.mean() - 1.96 * error, abs=0.1 * error)
    assert result.high == pytest.approx(difference.mean() + 1.96 * error, abs=0.1 * error)


def test_the_bootstraps_interval_misses_0_one_time_in_twenty_when_nothing_differs() -> None:
    generator = np.random.default_rng(2)
    missed = 0
    for _ in range(200):
        a, b = generator.normal(size=(2, 60))
        result = paired_bootstrap(a.tolist(), b.tolist(), samples=500)
        missed += not result.low <= 0 <= result.high
    # 5 % of 200: 10, within four standard deviations and a small-sample excess.
    assert 1 <= missed <= 10 + 4 * 3.1 + 3


def test_bootstrap_is_sure_of_a_large_difference_and_turns_with_its_arguments() -> None:
    a, b = [1.0] * 90 + [0.0] * 10, [0.0] * 50 + [1.0] * 50
    one, other = paired_bootstrap(a, b), paired_bootstrap(b, a)
    assert one.difference == pytest.approx(0.4)
    assert 0 < one.low < one.difference < one.high
    assert other.difference == -one.difference
    assert (other.low, other.high) == pytest.approx((-one.high, -one.low))


def test_bootstrap_is_a_function_of_its_seed() -> None:
    a, b = np.random.default_rng(5).random((2, 40)).tolist()
    assert paired_bootstrap(a, b) == paired_bootstrap(a, b)
    assert paired_bootstrap(a, b) != paired_bootstrap(a, b, seed=1)


def test_bootstrap_pairs_the_questions() -> None:
    # The methods scatter widely, their difference not at all: pairing sees it.
    b = np.random.default_rng(3).normal(size=50) * 100
    assert paired_bootstrap((b + 0.5).tolist(), b.tolist()).low == pytest.approx(0.5)


def test_bootstrap_of_more_questions_than_fit_one_chunk() -> None:
    scores = np.random.default_rng(4).random(3_000)
    result = paired_bootstrap(scores.tolist(), np.zeros(3_000).tolist(), samples=1_000)
    assert result.low < scores.mean() < result.high


@pytest.mark.parametrize(
    ("a", "b", "samples", "field"),
    [
        ([1.0], [1.0, 2.0], 10, "b"),
        ([], [], 10, "a"),
        ([1.0, float("nan")], [1.0, 2.0], 10, r"a[1] - b[1]"),
        ([1.0], [1.0], 0, "samples"),
    ],
)
def test_bootstrap_refuses_unusable_scores(a: list[float], b: list[float], samples: int, field: str) -> None:
    with pytest.raises(InputError) as caught:
        paired_bootstrap(a, b, samples=samples)
    assert caught.value.field == field
