"""In which language a text is."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from specrag.retrieval.language import language_of, languages_of, spaced


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Who discovered radium?", "english"),
        ("capital of France", "english"),
        ("Wann wurde die Firma gegründet?", "german"),
        ("Und sonntags?", "german"),
        ("Quel est le prix du H-200 ?", "french"),
        ("¿Quién descubrió el radio?", "spanish"),
        ("Qual è la capitale?", "italian"),
        ("Quem descobriu o rádio?", "portuguese"),
        ("Hoe lang is de garantie?", "dutch"),
        ("Vem upptäckte radium?", "swedish"),
        ("Кто открыл радий?", "russian"),
        ("公司什么时候成立？", "chinese"),
        ("H-200 的价格是多少？", "chinese"),
        ("東京はどこですか", "japanese"),
        ("라듐은 누가 발견했습니까?", "korean"),
        ("warranty H-350?", None),
        ("Thanks!", None),
        ("", None),
        ("1234 ?!", None),
    ],
)
def test_what_people_ask(text: str, language: str | None) -> None:
    assert language_of(text) == language


def test_a_name_in_another_script_is_no_language() -> None:
    assert (
        language_of("Who was Чайковский, and where did he live when he wrote his first symphony?")
        == "english"
    )


def test_languages_of_many_are_counted_and_strays_left_out() -> None:
    english, german = "The price of the lens is in the list.", "Der Preis steht in der Liste."
    assert languages_of([english, german, german, "H-200"]) == ("german", "english")
    assert languages_of([english] * 200 + [german]) == ("english",)
    assert languages_of(["H-200", ""]) == ()


def test_letters_without_spaces_become_pairs() -> None:
    assert spaced("保修期 H-200").split() == ["保修", "修期", "H-200"]
    assert spaced("plain words") == "plain words"


def test_real_questions_are_english(measuring_data: Path) -> None:
    found = []
    for name in ("nq", "webq", "triviaqa", "popqa"):
        with gzip.open(measuring_data / f"corpus_questions_{name}_dev.jsonl.gz") as lines:
            found += [language_of(json.loads(line)["question"]) for line in lines]
    assert set(found) <= {"english", None}
    assert found.count("english") > 0.99 * len(found)
