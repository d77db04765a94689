"""The EAGLE-2 heads that come with specrag: they belong to their models, and foresee what they say."""

from __future__ import annotations

import re

import pytest

from benchmarks.tokens import subjects as token_subjects
from specrag.language_model import LanguageModel
from specrag.methods.token_decoders import eagle
from specrag.models.eagle_files import head_folder, shipped_heads

PROMPTS = ("Explain in a few sentences how a bicycle stays upright.", "Write a short story about a lost key.")


def test_the_small_model_has_one() -> None:
    assert shipped_heads() == ["smollm2-135m"]
    assert set(token_subjects.headed("smollm2-135m")) >= {"eagle-2", "respec", "adaptive+eagle-2"}
    assert not token_subjects.headed("gemma-3-270m")


@pytest.mark.parametrize("name", shipped_heads())
def test_its_card_says_what_it_was_made_of(name: str) -> None:
    card = (head_folder(name) / "README.md").read_text(encoding="utf-8")
    for told in ("licence is Apache-2.0", "sha256", f"specrag train eagle --model {name}"):
        assert told in card
    measured = re.search(r"Measured in the engine.* ([\d.]+) tokens a pass", card)
    assert measured is not None
    assert float(measured[1]) > 1.9


def test_it_foresees_more_than_every_second_token(exact_llm: LanguageModel) -> None:
    plain = exact_llm.batch(PROMPTS, max_tokens=48, ignore_eos=True, method="plain")
    found = exact_llm.batch(PROMPTS, max_tokens=48, ignore_eos=True, method=eagle("smollm2-135m"))
    assert [made.text for made in found] == [made.text for made in plain]
    for made in found:
        assert made.usage.completion_tokens / made.usage.passes > 1.5
