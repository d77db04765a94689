"""Citations that stand behind an answer's sentences as it comes."""

from __future__ import annotations

import random

import pytest

from specrag.methods.citations import Support, find_citations, without_citations
from specrag.methods.citing import CitedText
from specrag.methods.prompts import LEAD

SOURCES = (
    "Marie Curie\nMarie Curie discovered radium with Pierre Curie in 1898.",
    "Copper\nCopper conducts electricity and heat well.",
    "M. Ward\nMatthew Stephen Ward is a singer-songwriter from Portland, Oregon.",
    "Marie Curie (film)\nA film about Marie Curie was shown in 1943.",
)
QUESTION = "Who discovered radium?"


def cite(*pieces: str, lead: str = "", question: str = QUESTION) -> CitedText:
    cited = CitedText(question, SOURCES, lead)
    shown = "".join([*map(cited.push, pieces), cited.end()])
    assert shown == cited.text
    assert cited.end() == ""
    return cited


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("Marie Curie discovered it.", "Marie Curie discovered it. [1]"),
        ("Marie Curie [3] discovered radium [2].", "Marie Curie discovered radium. [1]"),
        (
            "Copper conducts heat. M. Ward is from Oregon.",
            "Copper conducts heat. [2] M. Ward is from Oregon. [3]",
        ),
        ("Copper conducts heat\nOregon", "Copper conducts heat [2]\nOregon [3]"),
        ("Ward, of Oregon, likes copper electricity", "Ward, of Oregon, likes copper electricity [2][3]"),
        ("Copper has 99.9 percent.", "Copper has 99.9 percent. [2]"),
        ("I do not know.", "I do not know."),
        ("An array [i] of copper.", "An array [i] of copper. [2]"),
        ("", ""),
    ],
)
def test_marks_stand_behind_sentences(written: str, shown: str) -> None:
    assert cite(written).text == shown


def test_the_lead_and_the_mark_that_it_opens_are_not_shown() -> None:
    assert cite("2], Marie Curie did.", lead=LEAD).text == "Marie Curie did. [1]"
    assert cite("1] and [2], copper conducts.", lead=LEAD).text == "Copper conducts. [2]"
    assert cite("Marie Curie.", lead="Answer: ").text == "Answer: Marie Curie. [1]"
    assert cite(lead=LEAD).text == ""


def test_the_same_however_the_text_is_cut() -> None:
    written = '4], Marie Curie [2, 3] found "radium." Copper conducts (well). In the U.S. it was 1898!'
    written += "\n\n- Oregon [1]. End"
    whole = cite(written, lead=LEAD).text
    assert "[2, 3]" not in whole
    cuts = random.Random(0)
    for _ in range(50):
        places = sorted(cuts.sample(range(len(written)), 8))
        pieces = [written[a:b] for a, b in zip([0, *places], [*places, len(written)], strict=True)]
        assert cite(*pieces, lead=LEAD).text == whole
    assert without_citations(whole).startswith('Marie Curie found "radium." Copper conducts (well).')
    assert find_citations(whole, SOURCES).invalid == ()


def test_what_no_cited_passage_holds_is_named() -> None:
    assert cite("Radium was found by Marie Curie in 1901 in Paris.").unheld == ("1901", "Paris")
    assert cite("Marie Curie found Radium in 1898.").unheld == ()
    assert cite("Curie found it in Atlantis.", question="Was it found in Atlantis?").unheld == ()


def test_a_further_passage_is_cited_for_what_the_best_has_not() -> None:
    support = Support("Which film shows who found radium?", SOURCES)
    assert support.choose("Radium was discovered with Pierre in 1898 and a film shown in 1943.") == (1, 4)
    assert support.choose("Nothing at all.") == ()


def test_scripts_without_spaces_are_compared_by_pairs_of_characters() -> None:
    sources = ("北京是中国的首都。", "東京は日本の首都です。")
    assert Support("中国的首都在哪里?", sources).choose("中国的首都是北京。") == (1,)
    assert Support("日本の首都は?", sources).choose("日本の首都は東京です。") == (2,)
