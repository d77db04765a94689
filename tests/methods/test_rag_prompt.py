"""The prompt of standard RAG: what is in it, and what gives way where it does not fit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specrag.errors import ContextLengthError, InputError
from specrag.methods.prompts import (
    FEWEST_WORDS,
    INSTRUCTION,
    Message,
    as_text,
    build_prompt,
    check_history,
    fit_prompt,
    plain_words,
)
from specrag.methods.standard_rag.follow_up import retrieval_question, rewriting_prompt
from specrag.retrieval.passage import Passage

HISTORY = (
    {"role": "user", "content": "Who was Marie Curie?"},
    {"role": "assistant", "content": "According to passage [3], she was a physicist [1]."},
)


def passage(number: int, words: int = 8, title: str = "Title") -> Passage:
    return Passage(number, "file.txt", title, "", " ".join(f"p{number}w{i}" for i in range(words)), {})


def count_words(messages: Sequence[Message]) -> int:
    return sum(len(message["content"].split()) for message in messages)


def test_passages_are_numbered_and_the_question_comes_last() -> None:
    (message,) = build_prompt("Why?", [passage(7, 2), passage(9, 2, title="")])
    assert message["role"] == "user"
    assert message["content"] == f"[1] Title\np7w0 p7w1\n\n[2] p9w0 p9w1\n\n{INSTRUCTION}\nQuestion: Why?"


def test_earlier_citations_are_taken_out_since_their_numbers_mean_other_passages() -> None:
    system, *old, _ = build_prompt("Why?", [passage(1)], history=HISTORY, system="Be kind.")
    assert system == {"role": "system", "content": "Be kind."}
    assert [message["content"] for message in old] == ["Who was Marie Curie?", "she was a physicist."]
    assert plain_words("Copper [1].") == "Copper."


def test_text_for_a_model_without_a_chat_template() -> None:
    messages = build_prompt("Why?", [], history=HISTORY[:1], instruction="Answer.")
    assert as_text(messages) == "Who was Marie Curie?\n\nAnswer.\nQuestion: Why?\nAnswer:"
    assert as_text(messages, "According to [").endswith("\nAnswer: According to [")


@given(
    lengths=st.lists(st.integers(1, 60), max_size=6),
    room=st.integers(0, 300),
    turns=st.lists(st.integers(1, 60), max_size=4),
)
def test_what_fits_is_as_much_as_can(lengths: list[int], room: int, turns: list[int]) -> None:
    passages = [passage(number, words) for number, words in enumerate(lengths)]
    history = [
        {"role": "user", "content": " ".join([f"turn{number}"] * words)} for number, words in enumerate(turns)
    ]
    bare = count_words(build_prompt("Why?", ()))
    try:
        fitted = fit_prompt("Why?", passages, room=room, count=count_words, history=history)
    except ContextLengthError:
        assert room < bare + 2 + FEWEST_WORDS + 1 + room // 2  # only where not even a short passage fits
        return
    assert count_words(fitted.messages) <= room
    old = history[len(history) - fitted.history :]
    texts = " ".join(message["content"] for message in fitted.messages)
    assert all(message["content"] in texts for message in old)
    if fitted.history < len(history):
        more = history[len(history) - fitted.history - 1 :]
        assert count_words(build_prompt("Why?", (), history=more)) - bare > (room - bare) // 2
    if fitted.shortened:
        assert fitted.kept == 1
        assert count_words(build_prompt("Why?", passages[:1], history=old)) > room
        assert "p0w0" in texts
        assert "..." in texts
        return
    assert fitted.messages == build_prompt("Why?", passages[: fitted.kept], history=old)
    if fitted.kept < len(passages):
        assert count_words(build_prompt("Why?", passages[: fitted.kept + 1], history=old)) > room


def test_a_question_that_leaves_no_room_is_refused_in_one_line() -> None:
    with pytest.raises(ContextLengthError, match="shorten the question") as caught:
        fit_prompt("why " * 500, [passage(1)], room=200, count=count_words)
    assert "\n" not in str(caught.value)
    with pytest.raises(ContextLengthError):  # the question fits, no passage worth reading does
        fit_prompt(
            "Why?", [passage(1, 100)], room=count_words(build_prompt("Why?", ())) + 5, count=count_words
        )


@pytest.mark.parametrize(
    "history", ["Hello", [{"role": "system", "content": "x"}], [{"role": "user"}], ["Hello"], 3]
)
def test_history_of_another_form_is_refused(history: Sequence[Message]) -> None:
    with pytest.raises(InputError, match="history"):
        check_history(history)


@pytest.mark.parametrize(
    ("question", "rewritten", "searched"),
    [
        ("Where was she born?", "Where was Marie Curie born?", "Where was Marie Curie born?"),
        ("Where was she born?", '  "Where was Marie Curie born?"\nBecause', "Where was Marie Curie born?"),
        ("Where was she born?", "User: Where was Marie Curie born?", "Where was Marie Curie born?"),
        ("And her husband?", "Who was Pierre Curie?", "Who was Pierre Curie? And her husband?"),
        ("Where was she born?", "", "Where was she born?"),
        ("Where was she born?", "?!", "Where was she born?"),
        ("Where was she born?", "Marie Curie was " * 40, "Where was she born?"),
    ],
)
def test_a_rewriting_never_loses_the_question(question: str, rewritten: str, searched: str) -> None:
    assert retrieval_question(question, rewritten) == searched


@given(question=st.text(min_size=1, max_size=60), rewritten=st.text(max_size=300))
@example(question="À:È", rewritten="0A")  # together they pass for Italian, where "è" is no content word
def test_every_word_of_the_question_is_searched_for(question: str, rewritten: str) -> None:
    from specrag.methods.citations import content_words

    searched = retrieval_question(question, rewritten)
    assert searched.endswith(question) or set(content_words(question)) <= set(content_words(searched))


def test_rewriting_reads_the_end_of_the_conversation() -> None:
    (message,) = rewriting_prompt("Where was she born?", [*HISTORY, *HISTORY, *HISTORY])
    assert message["content"].count("User: Who was Marie Curie?") == 2
    assert "Assistant: she was a physicist." in message["content"]
    assert "User: Where was she born?" in message["content"]
