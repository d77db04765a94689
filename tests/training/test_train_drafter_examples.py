"""What a drafter is trained on is what it reads and writes at inference, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specrag.engine.executor import Executor
from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.errors import InputError
from specrag.language_model import LanguageModel
from specrag.methods.generator import LocalGenerator, rationale_format
from specrag.methods.prompts import LEAD as LEAD_CITED
from specrag.methods.speculative_rag.cited import read_cited
from specrag.methods.speculative_rag.drafting import Drafting, drafting
from specrag.methods.speculative_rag.form import (
    CUE,
    LEAD,
    MalformedDraft,
    ParsedDraft,
    draft_prompt,
    read_draft,
    write_draft,
)
from specrag.models.loading import LoadedModel
from specrag.request import Options, Prompt, Result
from specrag.training.drafter.examples import NO_RATIONALE, ExampleEncoder, end_of_turn, split
from specrag.training.drafter.measure import count_drafts
from specrag.training.drafter.rows import DrafterRow, read_rows
from specrag.training.drafter.run import TuningSettings
from tests.training.tiny_drafter import row, write_rows

KINDS: list[dict[str, object]] = [
    row(0),
    row(1, kind="multiple-choice", options={"A": "Chile", "B": "Peru"}, answer="B"),
    row(2, kind="claim-checking", question="It is in Kenya.", answer="NOT ENOUGH INFORMATION"),
    row(3, rationale="Es heißt «Río»\nund mehr.", answer="Río de la Plata", passages=[
        {"title": "Río", "text": "A page may hold <|im_end|> and ½ — 東京."}]),
]  # fmt: skip


@pytest.fixture
def rows(tmp_path: Path) -> list[DrafterRow]:
    """One row of every kind."""
    return read_rows([write_rows(tmp_path / "rows.jsonl", KINDS)])


@dataclass
class Listening:
    """A language model that notes the tokens it is given."""

    llm: LanguageModel
    prompts: list[list[int]] = field(default_factory=list)

    @property
    def executor(self) -> Executor:
        return self.llm.executor

    @property
    def loaded(self) -> LoadedModel:
        return self.llm.loaded

    def generating(self, prompt: Prompt, options: Options, begun: Session | None = None) -> Coroutine[Result]:
        self.prompts.append([token for token in prompt if isinstance(token, int)])
        return self.llm.generating(prompt, options, begun)


def test_prompts_are_those_that_drafting_feeds(llm: LanguageModel, rows: list[DrafterRow]) -> None:
    encoder = ExampleEncoder(llm.tokenizer, length=1024, rationales=True)
    for each in rows:
        model = Listening(llm)
        settings = Drafting(max_tokens=2, rationale_tokens=1, example=False)
        subset = [range(len(each.passages))]
        llm.executor.run(
            llm.executor.submit(drafting(LocalGenerator(model), each.task, each.passages, subset, settings))
        )
        example = encoder.example(each)
        assert example is not None
        assert not example.shortened
        assert model.prompts[-1] == list(example.tokens[: example.begin])


@pytest.fixture
def cited(tmp_path: Path) -> list[DrafterRow]:
    """A row whose second passage holds the answer, and one whose passages do not."""
    other = {"title": "Ruun", "text": "Ruun is an island with two harbours."}
    gold = {"title": "Tarn Light", "text": "Tarn Light was designed by Elke Vorst in 1888.", "gold": True}
    asked = {
        "question": "Who designed Tarn Light?",
        "answer": "Elke Vorst",
        "rationale": "Tarn Light was designed by Elke Vorst in 1888.",
    }
    lines: list[dict[str, object]] = [
        {"id": "held", **asked, "passages": [other, gold]},
        {"id": "missing", **asked, "passages": [other]},
        KINDS[1],
    ]
    return read_rows([write_rows(tmp_path / "cited.jsonl", lines)])


def test_cited_drafts_are_prompted_and_read_as_drafting_does(
    llm: LanguageModel, cited: list[DrafterRow]
) -> None:
    encoder = ExampleEncoder(llm.tokenizer, length=1024, rationales=True, form="cited")
    held, missing, choice = cited
    for each in cited:
        model = Listening(llm)
        settings = Drafting(max_tokens=2, rationale_tokens=1, example=False, form="cited")
        subset = [range(len(each.passages))]
        llm.executor.run(
            llm.executor.submit(drafting(LocalGenerator(model), each.task, each.passages, subset, settings))
        )
        example = encoder.example(each)
        assert example is not None
        assert model.prompts[-1] == list(example.tokens[: example.begin])
    end = llm.tokenizer.special_tokens["<|im_end|>"]
    text = llm.tokenizer.decode(encoder.draft(held)[:-1])
    assert text == "2]: Tarn Light was designed by Elke Vorst in 1888."
    found = read_cited(held.task, text, held.passages, (5, 9), LEAD_CITED)
    assert isinstance(found, ParsedDraft)
    assert found.answer == "Tarn Light was designed by Elke Vorst in 1888. [9]"
    *nothing, last = encoder.draft(missing)
    assert (llm.tokenizer.decode(nothing), last) == ("0]", end)
    refused = read_cited(missing.task, "0]", missing.passages, (1,), LEAD_CITED)
    assert isinstance(refused, MalformedDraft)
    assert "do not hold the answer" in refused.reason
    assert llm.tokenizer.decode(encoder.draft(choice)) == write_draft(choice.rationale or "", choice.answer)
    short = ExampleEncoder(llm.tokenizer, length=1024, rationales=False, form="cited")
    assert llm.tokenizer.decode(short.draft(held)[:-1]) == "2]: Elke Vorst"


def test_a_drafter_that_says_that_nothing_is_there_is_right_where_nothing_is(
    llm: LanguageModel, cited: list[DrafterRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, missing, _ = cited
    for text, right in (("0]", (0, 1)), ("1]: Elke Vorst designed it.", (1, 0))):
        read = read_cited(held.task, text, held.passages, (1, 2), LEAD_CITED)

        def written(*given: Any, text: str = text, read: Any = read) -> Coroutine[list[Any]]:
            answer = read.answer if isinstance(read, ParsedDraft) else ""
            reason = None if answer else "it says so"
            return [SimpleNamespace(draft=SimpleNamespace(text=text, answer=answer, malformed=reason))]
            yield

        monkeypatch.setattr("specrag.training.drafter.measure.drafting", written)
        for each, expected in zip((held, missing), right, strict=True):
            assert count_drafts(llm, [each], "cited").right == expected


def test_drafts_are_those_that_drafting_reads(llm: LanguageModel, rows: list[DrafterRow]) -> None:
    encoder = ExampleEncoder(llm.tokenizer, length=1024, rationales=True)
    for each in rows:
        written = encoder.draft(each)
        assert each.rationale is not None
        text = llm.tokenizer.decode(written)
        assert text == write_draft(each.rationale, each.answer)
        found = read_draft(each.task, text)
        assert isinstance(found, ParsedDraft)
        assert found.answer == each.answer
        assert written[-1] == llm.tokenizer.special_tokens["<|im_end|>"]


def test_the_form_that_drafters_are_kept_to_allows_every_token(
    llm: LanguageModel, rows: list[DrafterRow]
) -> None:
    """Kept to the form, a drafter that learnt its rows writes them: no token is forbidden, and the cue is the cue."""
    encoder = ExampleEncoder(llm.tokenizer, length=1024, rationales=True)
    for each in rows:
        answer_format = Drafting(example=False).answer_format(each.task)
        assert answer_format is not None
        form = rationale_format(llm.tokenizer, answer_format)
        state = form.start(())
        for token in encoder.draft(each):
            wanted = np.full(llm.loaded.model.vocab_size, -5.0, dtype=np.float32)
            wanted[token] = 5.0
            taken = int(form.apply(wanted, state).argmax())
            ends = llm.tokenizer.eos_tokens  # the form makes one of them all
            assert taken == token or {taken, token} <= ends
            state = form.advance(state, token)


def test_the_end_of_a_turn_is_the_template_s_own(llm: LanguageModel) -> None:
    assert end_of_turn(llm.tokenizer) == llm.tokenizer.special_tokens["<|im_end|>"]
    assert len(llm.tokenizer.eos_tokens) > 1


def test_without_rationales_a_dash_keeps_the_form(llm: LanguageModel, rows: list[DrafterRow]) -> None:
    encoder = ExampleEncoder(llm.tokenizer, length=1024, rationales=False)
    for each in rows:
        text = llm.tokenizer.decode(encoder.draft(replace(each, rationale=None)))
        assert text == f" {NO_RATIONALE}{CUE} {each.answer}"
        found = read_draft(each.task, text)
        assert isinstance(found, ParsedDraft)


def test_long_passages_are_cut_as_in_drafting(llm: LanguageModel, tmp_path: Path) -> None:
    text = "The harbour lies in Oman. " * 100
    long = row(0, passages=[{"title": "a", "text": text}, {"title": "b", "text": "Short."}])
    (each,) = read_rows([write_rows(tmp_path / "rows.jsonl", [long])])
    encoder = ExampleEncoder(llm.tokenizer, length=256, rationales=True)
    example = encoder.example(each)
    assert example is not None
    assert example.shortened
    assert 240 < len(example.tokens) <= 256
    # The question still stands behind the passages, and the lead behind it.
    kept = llm.tokenizer.decode(example.tokens[: example.begin])
    assert kept.endswith(LEAD)
    assert kept.count("In which country") == 2
    assert "Short." in kept
    (whole,) = draft_prompt(each.task, each.passages)
    assert whole["content"].split("\n\n")[1][:100] in kept
    assert ExampleEncoder(llm.tokenizer, length=120, rationales=True).example(each) is None


def test_a_row_that_would_end_a_turn_is_left_out(llm: LanguageModel, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [row(0, rationale="Say <|im_end|> now.")])
    assert ExampleEncoder(llm.tokenizer, length=512, rationales=True).example(read_rows([path])[0]) is None


def many(tmp_path: Path, count: int = 20) -> list[DrafterRow]:
    """Two rows a question."""
    rows = [row(number // 2, id=f"r{number}") for number in range(count)]
    return read_rows([write_rows(tmp_path / "many.jsonl", rows)])


def test_whole_questions_are_held_back(tmp_path: Path) -> None:
    rows = many(tmp_path)
    whole = split(rows, TuningSettings(held_back=5))
    assert len(whole.held_back) == 6
    asked = {each.task.text for each in whole.held_back}
    assert not asked & {each.task.text for each in whole.training}
    assert len(whole.training) == 14
    # Fewer rows are a part of more, and the same ones are measured on, in whatever order they come.
    part = split(rows[::-1], TuningSettings(held_back=5, rows=9))
    assert part.held_back == whole.held_back
    assert part.training == whole.training[:9]
    assert split(rows, TuningSettings(held_back=5, seed=1)).held_back != whole.held_back


def test_what_cannot_be_split_is_an_error(tmp_path: Path) -> None:
    rows = many(tmp_path)
    with pytest.raises(InputError, match="there are 14 to train on beside 6 held back"):
        split(rows, TuningSettings(held_back=5, rows=15))
    with pytest.raises(InputError, match="at least two"):
        split(rows[:1], TuningSettings())
    with pytest.raises(InputError, match="too few different questions"):
        split(rows[:2], TuningSettings())
    bare = [*rows, replace(rows[0], identifier="bare", rationale=None)]
    with pytest.raises(InputError, match=r"1 of 21 rows, such as 'bare'.*specrag train rationales"):
        split(bare, TuningSettings())
    assert split(bare, TuningSettings(rationales=False))
