"""Checks of values: what passes, what is refused, and the remedy that is named."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from specrag.checks import check_choice, check_number, check_text, check_whole, nearest, plain
from specrag.errors import InputError


@pytest.mark.parametrize(
    ("value", "limits", "remedy"),
    [
        (0, (1,), "give a whole number of at least 1"),
        (True, (1,), "give a whole number of at least 1"),
        (1.0, (1,), "give a whole number of at least 1"),
        ("3", (1,), "give a whole number of at least 1"),
        (None, (1,), "give a whole number of at least 1"),
        (np.int64(3), (1,), "give a whole number of at least 1"),  # JSON would not take it
        (1001, (1, 1000), "give a whole number from 1 to 1,000"),
        (-1, (0, 5, "count something"), "count something"),
    ],
)
def test_what_is_no_whole_number_in_range_is_refused(value: object, limits: Any, remedy: str) -> None:
    with pytest.raises(InputError) as caught:
        check_whole("tokens", value, *limits)
    assert str(caught.value) == f"tokens: {value!r} is not usable: {remedy}"


@pytest.mark.parametrize(
    ("value", "limits", "remedy"),
    [
        (True, {}, "give a number"),
        (math.nan, {}, "give a number"),
        (math.inf, {"least": 0}, "give a number of at least 0"),
        (-0.1, {"least": 0, "most": 1}, "give a number from 0 to 1"),
        (1.5, {"most": 1}, "give a number of at most 1"),
        (0, {"above": 0}, "give a number above 0"),
        ("1", {"above": 0, "remedy": "give seconds"}, "give seconds"),
    ],
)
def test_what_is_no_number_in_range_is_refused(value: object, limits: Any, remedy: str) -> None:
    with pytest.raises(InputError) as caught:
        check_number("share", value, **limits)
    assert str(caught.value) == f"share: {value!r} is not usable: {remedy}"


@pytest.mark.parametrize("value", ["", " \n", None, 3, b"text"])
def test_what_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(InputError, match="give a text that is not empty"):
        check_text("query", value)


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ("hybird", "did you mean hybrid? take one of flat, hybrid"),
        ("graph", "take one of flat, hybrid"),
        (None, "take one of flat, hybrid"),
        (["flat"], "did you mean flat? take one of flat, hybrid"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(value: object, remedy: str) -> None:
    with pytest.raises(InputError) as caught:
        check_choice("index", value, ("flat", "hybrid"))
    assert str(caught.value) == f"index: {value!r} is not usable: {remedy}"


def test_good_values_are_given_back() -> None:
    assert check_whole("k", 3, 1, 3) == 3
    assert check_number("b", 1, 0, 1) == 1
    assert check_text("query", " a ") == " a "
    assert check_choice("index", "flat", ["flat"]) == "flat"


def test_numbers_of_numpy_become_plain() -> None:
    assert (type(plain(np.int64(3))), type(plain(np.float32(0.5)))) == (int, float)
    assert plain("text") == "text"
    assert not isinstance(plain(np.bool_(True)), int)


def test_nothing_is_suggested_that_is_not_alike() -> None:
    assert nearest("x", ["flat", "hybrid"]) is None
    assert nearest("flatt", ["flat", "hybrid"]) == "flat"
