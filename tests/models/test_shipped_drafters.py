"""The RAG drafters that come with specrag: they belong to their models, keep to the form and find what is asked for."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

import specrag
from specrag.methods.speculative_rag.task import Task
from specrag.models.adapters import ADAPTER_CONFIG, DRAFTER_RECORD, find_adapter, shipped_adapters
from specrag.retrieval.passage import Passage
from specrag.training.drafter.measure import count_drafts
from specrag.training.drafter.rows import DrafterRow

NAMES = [folder.name for folder in shipped_adapters()]
TEXTS = {
    "Tarn Light": "Tarn Light is a lighthouse on Ruun. It was designed by Elke Vorst in 1888.",
    "Ruun": "Ruun is an island with two harbours. Its largest town is Skelby, where 4,100 people live.",
    "Skelby Museum": "The Skelby Museum shows ship models. It was opened in 1931 by Halvard Brekke, a fisherman.",
    "Vorst": "Pieter Vorst was a Dutch painter who lived in Haarlem and never saw the sea.",
}
QUESTIONS = {
    "Who designed Tarn Light?": "Elke Vorst",
    "What is the largest town of Ruun?": "Skelby",
    "When was the Skelby Museum opened?": "1931",
    "What was Halvard Brekke's occupation?": "fisherman",
    "Where did Pieter Vorst live?": "Haarlem",
    "What does the Skelby Museum show?": "ship models",
}


def test_the_small_model_has_one() -> None:
    assert [folder.name for folder in shipped_adapters("smollm2-135m")] == ["smollm2-135m-drafter"]
    assert not shipped_adapters("gemma-3-270m")
    assert find_adapter("smollm2-135m-drafter").is_dir()


@pytest.mark.parametrize("name", NAMES)
def test_its_card_says_what_it_was_made_of(name: str) -> None:
    folder = find_adapter(name)
    record = json.loads((folder / DRAFTER_RECORD).read_text())
    base = json.loads((folder / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
    assert record["model"] == base
    drafted = record["kept"]["drafted"]
    assert drafted["malformed"] <= 0.05 * (drafted["right"] + drafted["wrong"] + drafted["malformed"])
    assert record["kept"]["held_back"] < record["untuned"]["held_back"]
    card = (folder / "README.md").read_text()
    for told in ("Apache-2.0", "sha256", f"specrag train drafter rationales --model {base}"):
        assert told in card
    for text in (card, json.dumps(record)):
        assert not any(word in text for word in ("/tmp", "/work", "/home"))


@pytest.mark.slow
def test_it_keeps_to_the_form_without_being_kept_to_it(smollm2: Path) -> None:
    passages = tuple(Passage(n, "", title, "", text, {}) for n, (title, text) in enumerate(TEXTS.items()))
    rows = [DrafterRow(asked, Task(asked), answer, passages) for asked, answer in QUESTIONS.items()]
    with closing(
        specrag.load("smollm2-135m", dtype="int8", device="cpu", adapter="smollm2-135m-drafter")
    ) as llm:
        assert llm.loaded.drafter_form == "paper"
        tuned = count_drafts(llm, rows)
    assert tuned.malformed <= 1
    assert tuned.right >= 3
