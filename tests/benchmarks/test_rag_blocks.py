"""The bench of pasted passages: what is read anew, and what it compares."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.answers.data import Question, load_sets
from benchmarks.rag import longbench
from benchmarks.rag.blocks import Placed, Trial, _chosen, _first, _in_eight_bits, table
from specrag.engine.session import Session
from specrag.methods.prompts import build_prompt, encode_prompt

if TYPE_CHECKING:
    from specrag import LanguageModel


TOWNS = (("Dameh", "Iran"), ("Rhosgoch", "Wales"), ("Tuskegee", "Alabama"), ("Kiruna", "Sweden"))


@pytest.fixture(scope="module")
def question() -> Question:
    """With passages of some eighty tokens."""
    found = load_sets(None, ())["sample"][0]
    longer = [replace(each, text=" ".join([each.text] * 3)) for each in found.passages]
    return replace(found, passages=tuple(longer))


def keys(session: Session, rows: int) -> torch.Tensor:
    return torch.stack([session.cache.rows(layer, 0, rows) for layer in range(session.cache.shape.layers)])


def test_what_is_read_anew_in_whole_is_exact(exact_llm: LanguageModel, question: Question) -> None:
    trial = Trial(exact_llm)
    prompt: Any = encode_prompt(exact_llm, build_prompt(question.task.text, question.passages), {}).prompt
    placed = trial._place(prompt, question.passages)
    assert len(placed) > 1
    rows = placed[-1].span[1] - 1
    exact = keys(trial._run(trial._read(prompt)), rows)
    whole = trial._run(trial._paste(prompt, placed, _first(placed, 10_000)))
    assert whole.pasted == 0
    torch.testing.assert_close(keys(whole, rows), exact, rtol=1e-3, atol=1e-3)  # read in other chunks
    some = trial._run(trial._paste(prompt, placed, _first(placed, 16)))
    assert some.tokens == list(prompt[: placed[-1].span[1]])
    assert some.pasted == sum(max(end - start - 16, 0) for start, end in (one.span for one in placed))
    assert (keys(some, rows) - exact).abs().max() > 0.1


def test_every_way_answers(exact_llm: LanguageModel, question: Question) -> None:
    told = Trial(exact_llm).answers(question)
    ways = {name: value for name, value in told.items() if isinstance(value, dict)}
    assert list(ways) == ["exact", "none", "first 16", "first 32", "disk", "deviation 15 %", "deviation 30 %"]
    assert 0 < told["pasted"] < told["tokens"]
    assert all(one["first"] > 0 and one["text"] for one in ways.values())
    shown = table([{"model": "m", **told}, {"model": "m", **told}])
    assert len(shown.splitlines()) == 2 + len(ways)
    assert "| m | exact | 2 |" in shown
    few = Trial(exact_llm, ["exact", "none"]).answers(question)
    assert [name for name, value in few.items() if isinstance(value, dict)] == ["exact", "none"]
    assert "| m | none | 3 |" in table([{"model": "m", **one} for one in (told, few, told)])


def test_a_long_prompt_is_split_into_its_text_and_its_question() -> None:
    prompt = (
        "Answer the question.\n\nPassage 1:\nA.\n\nPassage 2:\nB.\n\n"
        "Answer the question.\n\nQuestion: Who?\nAnswer:"
    )
    assert longbench.split(prompt) == ("Passage 1:\nA.\n\nPassage 2:\nB.", "Who?")


def test_a_long_text_gives_the_passages_nearest_to_its_question(tmp_path: Path) -> None:
    text = "\n\n".join(f"{name} is a town in {place}. " * 15 for name, place in TOWNS)
    prompt = f"Answer.\n\n{text}\n\nAnswer.\n\nQuestion: Where is Rhosgoch?\nAnswer:"
    row = {"id": "1", "task": "2wikimqa", "prompt": prompt, "answers": ["Wales"]}
    other = {**row, "id": "2", "task": "triviaqa"}
    path = tmp_path / "longbench_v1_mini.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (row, other)))
    [found] = longbench.load(tmp_path)
    assert found.task.text == "Where is Rhosgoch?"
    assert found.is_right("It is in Wales.")
    assert len(found.passages) > 1
    assert "Rhosgoch" in found.passages[0].text
    [longer] = longbench.load(tmp_path, passages=1, characters=2400)
    assert len(longer.passages) == 1
    assert max(len(passage.text) for passage in found.passages) <= longbench.CHARACTERS
    assert longbench.CHARACTERS < len(longer.passages[0].text) <= 2400
    assert [len(one.passages) for one in longbench.load(tmp_path, passages=2)] == [2]


def test_the_windows_that_deviate_most_are_chosen() -> None:
    placed = [Placed((0, 40), None, 0), Placed((50, 82), None, 0)]  # type: ignore[arg-type]
    deviation = [1.0] * 16 + [5.0] * 16 + [0.0] * 34 + [3.0] * 16
    assert _chosen(placed, deviation, 0.2) == [[(16, 32)], []]
    assert _chosen(placed, deviation, 0.3) == [[(16, 32)], [(66, 82)]]
    assert _chosen(placed, deviation, 0) == [[], []]


def test_eight_bits_move_numbers_a_little(exact_llm: LanguageModel, question: Question) -> None:
    trial = Trial(exact_llm)
    session = trial._run(trial._read(exact_llm.encode(question.task.text, raw=True)))
    rows = session.cache.length
    coarse = _in_eight_bits(session)
    assert coarse.tokens == session.tokens
    before, after = keys(session, rows).float(), keys(coarse, rows).float()
    assert not torch.equal(before, after)
    assert ((before - after).abs() <= before.abs().amax(dim=-1, keepdim=True) * (1 / 254 + 2**-7)).all()
