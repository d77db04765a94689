"""Citations in an answer: found wherever they stand, checked against the sources."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrag.methods.citations import (
    SUPPORTED,
    content_words,
    find_citations,
    support,
    without_citations,
)

SOURCES = (
    "Copper\nCopper is a soft metal with the symbol Cu.",
    "Heat\nMetals conduct heat well; gold conducts 318 W.",
    "Danube\nThe Danube flows into the Black Sea.",
)


@pytest.mark.parametrize(
    ("text", "numbers", "invalid"),
    [
        ("Copper is soft [1].", (1,), ()),
        ("Copper[1][2]", (1, 2), ()),
        ("Copper [1, 3] and [ 2 ].", (1, 2, 3), ()),
        ("Copper [1-3].", (1, 2, 3), ()),
        ("Copper [2\u20133; 1]", (1, 2, 3), ()),
        ("Copper \u30102\u3011", (2,), ()),
        ("Copper [4] or [0].", (), (0, 4)),
        ("Copper [2-999].", (2, 3), (999,)),
        ("Copper [3-1].", (1, 3), ()),
        ("In [1999] copper [a] was [1.5] cheap (1).", (), ()),
        ("", (), ()),
    ],
)
def test_numbers(text: str, numbers: tuple[int, ...], invalid: tuple[int, ...]) -> None:
    citations = find_citations(text, SOURCES)
    assert citations.numbers == numbers
    assert citations.invalid == invalid


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Copper is soft [1].", "Copper is soft."),
        ("Copper is soft. [1]", "Copper is soft."),
        ("Tin is old. Copper is soft. [1] Iron is hard.", "Copper is soft."),
        ("Tin is old. Copper is soft [1]. Iron is hard.", "Copper is soft."),
        ("Copper is soft\n\n[1]", "Copper is soft"),
        ("[1] Copper is soft.", "Copper is soft."),
        (
            "Gold conducts 3.5 W, it says [1], more than tin. End.",
            "Gold conducts 3.5 W, it says, more than tin.",
        ),
        ("[1]", ""),
    ],
)
def test_sentence_of_a_citation(text: str, sentence: str) -> None:
    (citation,) = find_citations(text, SOURCES).found
    assert citation.sentence == sentence
    assert text[citation.start : citation.end] == "[1]"


def test_support_tells_the_right_source_from_a_wrong_one() -> None:
    right, wrong = find_citations("The Danube flows into the Black Sea [3][1].", SOURCES).found
    assert right.support == 1.0
    assert right.supported
    assert wrong.support == 0.0
    assert not wrong.supported
    assert find_citations("The Danube flows into the Black Sea [3][1].", SOURCES).unsupported == (wrong,)
    little, most = find_citations("Copper conducts heat [1][2].", SOURCES).found
    assert little.support == pytest.approx(1 / 3)
    assert not little.supported
    assert most.support == pytest.approx(2 / 3)
    assert most.supported


def test_what_cannot_be_checked_has_no_support() -> None:
    nothing, missing = find_citations("It is [1]. Copper is soft [9].", SOURCES).found
    assert nothing.valid
    assert nothing.support is None
    assert not missing.valid
    assert missing.support is None
    assert not nothing.supported
    assert not missing.supported
    assert support("It is.", SOURCES[0]) is None


def test_words_are_compared_without_case_form_or_possession() -> None:
    assert content_words("The DANUBE's ﬁsh, and it.") == ["danube", "fish"]
    assert support("Zu\u0308rich", "Z\u00fcrich") == 1.0


def test_marks_are_taken_out_with_the_space_in_front() -> None:
    assert without_citations("Copper [1] is soft [2, 3].\nTin [4]") == "Copper is soft.\nTin"
    assert without_citations("list[0] stays as list") == "list stays as list"


@given(text=st.text(alphabet="ab .!?\n[]123-,;", max_size=60), count=st.integers(0, 3))
def test_every_citation_is_whole_and_in_its_place(text: str, count: int) -> None:
    citations = find_citations(text, SOURCES[:count])
    for citation in citations.found:
        assert text[citation.start] == "["
        assert text[citation.end - 1] == "]"
        assert citation.valid == (1 <= citation.number <= count)
        assert citation.supported == (citation.support is not None and citation.support >= SUPPORTED)
        assert "[1]" not in citation.sentence
    assert set(citations.numbers).isdisjoint(citations.invalid)
    assert find_citations(without_citations(text), SOURCES[:count]).found == () or "[" in without_citations(
        text
    )
