"""A stream of pieces equals the whole text cut once, and holds back no more than it must."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.engine.stopping import Piece, StopChecker, StopConditions
from specrag.errors import InputError, SpecragError

STOP_TOKEN = 7


def cut(text: str, stop_strings: Sequence[str]) -> tuple[str, bool]:
    """The rule, character by character: the first character that completes a stop string ends the text."""
    for end in range(1, len(text) + 1):
        starts = [end - len(string) for string in stop_strings if text[:end].endswith(string)]
        if starts:
            return text[: min(starts)], True
    return text, False


def may_become_a_stop(end: str, stop_strings: Sequence[str]) -> bool:
    return any(string.startswith(end) for string in stop_strings)


@settings(max_examples=400, deadline=None)
@given(
    # Two letters, so that stop strings begin, overlap, and lie within one another all the time.
    pieces=st.lists(st.text("ab", max_size=5), max_size=8),
    rest=st.text("ab", max_size=3),
    stop_strings=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_streaming_equals_cutting_the_whole_text(
    pieces: list[str], rest: str, stop_strings: list[str]
) -> None:
    checker = StopChecker(StopConditions(max_tokens=100, stop_strings=tuple(stop_strings)))
    shown, taken, stopped = "", "", False
    for piece in pieces:
        got = checker.push(0, piece)
        shown += got.text
        taken += piece
        if got.finish_reason is not None:
            stopped = True
            break
        held = taken[len(shown) :]
        assert taken.startswith(shown)
        assert len(held) < max(map(len, stop_strings), default=1)
        assert not held or may_become_a_stop(held, stop_strings)
    last = checker.finish(rest)
    whole, found = cut("".join(pieces) + rest, stop_strings)
    assert shown + last.text == whole
    assert last.finish_reason == ("stop" if found else None)
    assert stopped == cut("".join(pieces), stop_strings)[1]


def push_all(conditions: StopConditions, items: Sequence[tuple[int, str]]) -> list[Piece]:
    checker = StopChecker(conditions)
    return [checker.push(token, text) for token, text in items]


def test_a_stop_string_across_tokens_is_not_shown_nor_anything_behind_it() -> None:
    conditions = StopConditions(max_tokens=10, stop_strings=("\n\nUser:",))
    checker = StopChecker(conditions)
    assert checker.push(1, "Yes.\n") == Piece("Yes.")
    assert checker.push(2, "\nUs") == Piece("")
    assert checker.push(3, "er: and more") == Piece("", "stop")
    assert checker.finish("ignored") == Piece("", "stop")


def test_text_held_back_in_vain_is_shown_as_soon_as_it_is_safe() -> None:
    conditions = StopConditions(max_tokens=10, stop_strings=("aab",))
    assert push_all(conditions, [(1, "a"), (1, "a"), (1, "a"), (1, "c")]) == [
        Piece(""),
        Piece(""),
        Piece("a"),
        Piece("aac"),
    ]


def test_the_stop_string_completed_first_wins_and_then_the_longest() -> None:
    assert push_all(StopConditions(9, stop_strings=("bc", "abcd")), [(1, "xabcd")]) == [Piece("xa", "stop")]
    assert push_all(StopConditions(9, stop_strings=("bc", "abc")), [(1, "xabcd")]) == [Piece("x", "stop")]


def test_a_stop_token_ends_the_text_unseen_and_releases_what_was_held_back() -> None:
    checker = StopChecker(StopConditions(10, frozenset({STOP_TOKEN}), ("END",)))
    assert checker.push(1, "the EN") == Piece("the ")
    assert checker.push(STOP_TOKEN, "</s>") == Piece("", "stop")
    assert checker.finish("\ufffd") == Piece("EN\ufffd", "stop")


def test_max_tokens_gives_length_unless_the_last_token_stops() -> None:
    conditions = StopConditions(2, frozenset({STOP_TOKEN}), ("!",))
    checker = StopChecker(conditions)
    assert checker.push(1, "a") == Piece("a")
    assert checker.push(1, "b") == Piece("b", "length")
    assert checker.finish("") == Piece("", "length")
    assert push_all(conditions, [(1, "a"), (STOP_TOKEN, "")])[-1] == Piece("", "stop")
    assert push_all(conditions, [(1, "a"), (1, "b!")])[-1] == Piece("b", "stop")


def test_at_the_length_the_held_text_is_released_and_a_late_stop_string_still_counts() -> None:
    conditions = StopConditions(1, stop_strings=("ab",))
    checker = StopChecker(conditions)
    assert checker.push(1, "xa") == Piece("x", "length")
    assert checker.finish("c") == Piece("ac", "length")
    checker = StopChecker(conditions)
    assert checker.push(1, "xa") == Piece("x", "length")
    assert checker.finish("b") == Piece("", "stop")


def test_a_request_that_ends_early_gets_its_text() -> None:
    checker = StopChecker(StopConditions(10, stop_strings=("ab",)))
    assert checker.push(1, "xa") == Piece("x")
    assert checker.finish() == Piece("a", None)


@pytest.mark.parametrize("last", [(STOP_TOKEN, ""), (1, "!"), (1, "long enough")])
def test_nothing_may_follow_the_end(last: tuple[int, str]) -> None:
    checker = StopChecker(StopConditions(2, frozenset({STOP_TOKEN}), ("!",)))
    checker.push(1, "a")
    assert checker.push(*last).finish_reason is not None
    with pytest.raises(SpecragError, match="after the end"):
        checker.push(1, "b")
    checker.finish("")
    with pytest.raises(SpecragError, match="flushed"):
        checker.finish("")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "3"),
        ("stop_tokens", 3),
        ("stop_tokens", {"a"}),
        ("stop_tokens", {-1}),
        ("stop_tokens", {True}),
        ("stop_strings", "stop"),
        ("stop_strings", 3),
        ("stop_strings", ("",)),
        ("stop_strings", (b"a",)),
    ],
)
def test_unusable_conditions_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        StopConditions(**({"max_tokens": 5} | {field: value}))
    assert caught.value.field == field


def test_conditions_are_frozen_values() -> None:
    given_tokens = {np.int64(3)}
    conditions = StopConditions(5, given_tokens, ["a"])  # type: ignore[arg-type]
    given_tokens.add(np.int64(4))
    assert conditions == StopConditions(5, frozenset({3}), ("a",))
    assert hash(conditions) == hash(StopConditions(5, frozenset({3}), ("a",)))
