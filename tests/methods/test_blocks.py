"""Passages whose keys and values are kept: what is not read again, for whom, and what it may not touch."""

from __future__ import annotations

import json
from typing import Any

import pytest

import specrag
from specrag import InputError, LanguageModel, Result, StandardRAG
from specrag.engine.session import Session
from specrag.methods.blocks import ANEW
from specrag.retrieval.passage import Passage
from tests.sample import SUMMARIES

QUESTION = "Who discovered radium?"
BLOCKS = StandardRAG(reuse="blocks")


@pytest.fixture
def llm(caching_llm: LanguageModel) -> LanguageModel:
    """It has read nothing yet."""
    caching_llm.prefixes.clear()
    return caching_llm


@pytest.fixture(scope="module")
def passages() -> list[Passage]:
    """Three of some eighty tokens each."""
    lines = SUMMARIES.read_text(encoding="utf-8").splitlines()[:3]
    texts = [str(json.loads(line)["text"])[:400] for line in lines]
    return [Passage(number, "a.md", "", "", text, {}) for number, text in enumerate(texts)]


def ask(llm: LanguageModel, passages: list[Passage], method: StandardRAG = BLOCKS, **call: Any) -> Result:
    return llm.generate(QUESTION, method=method, passages=passages, max_tokens=6, **call)


def test_passages_are_read_once_wherever_they_stand(llm: LanguageModel, passages: list[Passage]) -> None:
    one, two, three = passages
    first = ask(llm, [one, two, three])
    assert first.usage.pasted > 0.5 * first.usage.prompt_tokens
    assert first.usage.cached_tokens == 0
    assert first.usage.exact is False
    again = ask(llm, [three, one])
    assert again.usage.cached_tokens >= again.usage.pasted > 0.4 * again.usage.prompt_tokens
    assert again.text
    assert again.details is not None
    assert any("an approximation" in note for note in again.details.notes())
    assert again.describe_usage()["pasted"] == again.usage.pasted
    with_new = ask(llm, [two, Passage(9, "b.md", "", "", "The Danube ends in the Black Sea. " * 8, {})])
    assert 0 < with_new.usage.cached_tokens < with_new.usage.pasted


def test_a_pasted_prompt_that_comes_again_is_not_pasted_again(
    llm: LanguageModel, passages: list[Passage]
) -> None:
    first, again = ask(llm, passages), ask(llm, passages)
    assert again.text == first.text
    assert again.usage.pasted == first.usage.pasted
    assert again.usage.cached_tokens > again.usage.pasted + 2 * ANEW  # beginnings of passages, too
    assert ask(llm, passages, tenant="another").usage.cached_tokens == 0
    assert ask(llm, passages, StandardRAG()).usage.exact


def test_a_tenant_finds_nothing_of_another(llm: LanguageModel, passages: list[Passage]) -> None:
    ask(llm, passages, tenant="one")
    assert ask(llm, passages, tenant="two").usage.cached_tokens == 0


def test_exact_answers_are_as_ever(llm: LanguageModel, passages: list[Passage]) -> None:
    """What was pasted is no beginning of anything; what was read alone may be one."""
    expected = ask(llm, passages, StandardRAG(), log_probs=1)
    llm.prefixes.clear()
    ask(llm, passages)
    found = ask(llm, passages, StandardRAG(), log_probs=1)
    assert found.tokens == expected.tokens
    assert found.usage.pasted == 0
    assert found.usage.exact
    assert found.usage.cached_tokens < 60  # the template in front of all prompts


def test_a_short_passage_is_read(llm: LanguageModel) -> None:
    passage = Passage(0, "a.md", "", "", "Marie Curie discovered radium.", {})
    assert len(llm.encode(passage.text, raw=True)) < ANEW
    assert ask(llm, [passage]).usage.pasted == 0
    assert ask(llm, [Passage(1, "a.md", "", "", "1", {}), passage]).usage.pasted == 0  # one token


def test_every_session_is_closed(
    llm: LanguageModel, passages: list[Passage], monkeypatch: pytest.MonkeyPatch
) -> None:
    born: list[Session] = []
    make = Session.__init__

    def noted(session: Session, *words: Any, **options: Any) -> None:
        born.append(session)
        make(session, *words, **options)

    monkeypatch.setattr(Session, "__init__", noted)
    ask(llm, passages)
    kept = [session for _, session in llm.prefixes._entries.values()]
    assert [session for session in born if session.cache.length and session not in kept] == []
    with pytest.raises(specrag.DeadlineExceeded):
        ask(llm, passages[::-1], tenant="late", timeout=1e-6)
    kept = [session for _, session in llm.prefixes._entries.values()]
    assert [session for session in born if session.cache.length and session not in kept] == []


def test_who_keeps_nothing_is_told_so(exact_llm: LanguageModel, passages: list[Passage]) -> None:
    with pytest.raises(InputError, match=r"reuse: 'blocks' .* prefix cache"):
        ask(exact_llm, passages)
