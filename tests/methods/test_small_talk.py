"""What is said between questions, and what is a question all the same."""

from __future__ import annotations

import pytest

from specrag.methods.small_talk import small_talk


@pytest.mark.parametrize(
    ("said", "begins"),
    [
        ("Thanks!", "You are welcome"),
        ("ok, thank you very much", "You are welcome"),
        ("Hello, thanks for your help :-)", "You are welcome"),
        ("hello", "Hello"),
        ("Hi there! How are you?", "Hello"),
        ("Good evening everyone", "Hello"),
        ("Thats all for now, bye", "Goodbye"),
        ("I see, that's all then. Good night!", "Goodbye"),
        ("Got it.", "Good."),
        ("Oh nice", "Good."),
    ],
)
def test_talk_is_answered(said: str, begins: str) -> None:
    assert str(small_talk(said)).startswith(begins)


@pytest.mark.parametrize(
    "asked",
    [
        "",
        "?!",
        "and so",  # words that only go along
        "Thanks, and when does tin melt?",
        "Hello world program",
        "Who wrote Goodbye to Berlin?",
        "Is it good?",
        "night",
        "What is okay in French?",
    ],
)
def test_a_question_is_none(asked: str) -> None:
    assert small_talk(asked) is None
