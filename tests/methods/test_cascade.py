"""The cascade: who answers, what the model is asked, and what is told of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import specrag
from specrag import InputError, KnowledgeBase, Resources, StandardRAG
from specrag.asking import Answerer
from specrag.engine.executor import run
from specrag.engine.outputs import LOGITS
from specrag.engine.session import Session
from specrag.methods.standard_rag.cascade import Cascade, CascadeAnswer, Checked, check_prompt
from specrag.request import ABSTENTION, Request, Result, Sources
from specrag.retrieval.passage import Passage
from specrag.speculation.decode import Step
from specrag.speculation.tree import DraftTree
from tests.methods.run import played
from tests.sample import build_sample

if TYPE_CHECKING:
    from specrag import LanguageModel

QUESTION = "Who discovered radium?"
TOKENS = 16


@pytest.fixture(scope="module")
def kb(model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(build_sample(tmp_path_factory.mktemp("kb") / "kb")) as kb:
        yield kb


@pytest.fixture(scope="module")
def small(smollm2: Path) -> Iterator[LanguageModel]:
    """Another model: the same with an adapter, which makes it write otherwise."""
    small = specrag.load("smollm2-135m", device="cpu", adapter="smollm2-135m-drafter")
    yield small
    small.close()


@pytest.fixture(scope="module")
def host(llm: LanguageModel, small: LanguageModel) -> Answerer:
    return Answerer(Resources(llm, drafter=small))


def told(host: Answerer, question: Any = QUESTION, **call: Any) -> tuple[list[object], Result]:
    stream = played(host.stream(question, **{"max_tokens": TOKENS, **call}))
    assert isinstance(stream.answer, Result)
    return stream.events, stream.answer


def shown(events: Sequence[object]) -> str:
    return "".join(event.text for event in events if isinstance(event, Step)).strip()


def test_an_answer_that_convinces_is_the_small_models(
    host: Answerer, small: LanguageModel, kb: KnowledgeBase
) -> None:
    expected = small.generate(QUESTION, method=StandardRAG(), kb=kb, k=2, max_tokens=TOKENS)
    events, result = told(host, method=Cascade(confidence=0.0), kb=kb, k=2)
    assert result.text == expected.text == shown(events)
    details = result.details
    assert isinstance(details, CascadeAnswer)
    assert details.verdict.taken
    (checked,) = [event for event in events if isinstance(event, Checked)]
    assert (checked.text, checked.taken, checked.status) == (expected.text, True, "")
    # Nothing of a draft is shown before it is judged.
    assert not any(isinstance(event, Step) for event in events[: events.index(checked)])
    assert result.sources == expected.sources
    assert result.timing.phases["check"] > 0


def test_an_answer_that_does_not_is_the_models_own(
    host: Answerer, llm: LanguageModel, small: LanguageModel, kb: KnowledgeBase
) -> None:
    expected = llm.generate(QUESTION, method=StandardRAG(), kb=kb, k=3, max_tokens=TOKENS)
    draft = small.generate(QUESTION, method=StandardRAG(), kb=kb, k=3, max_tokens=TOKENS)
    assert expected.text != draft.text
    events, result = told(host, method=Cascade(confidence=1.0), kb=kb, k=3)
    assert result.text == expected.text == shown(events)
    details = result.details
    assert isinstance(details, CascadeAnswer)
    assert (details.verdict.taken, details.draft.text) == (False, draft.text)
    assert len([event for event in events if isinstance(event, Sources)]) == 1
    assert [source.score for source in result.sources] == [source.score for source in expected.sources]
    assert result.sources == expected.sources
    assert result.timing.phases["draft"] > 0
    # What was read for the verdict is not read again, and nothing of it is held afterwards.
    assert result.usage.cached_tokens > 50
    assert expected.usage.cached_tokens < result.usage.cached_tokens
    assert not llm.prefixes.nbytes
    assert told(host, method=StandardRAG(), kb=kb, k=3)[1].usage.cached_tokens == expected.usage.cached_tokens
    assert "doubted" in details.figures()[0]
    assert result.timing.total > result.timing.prefill + result.timing.decode + result.timing.phases["draft"]


def test_a_small_model_reads_the_best_passages_and_the_model_all(
    host: Answerer, llm: LanguageModel, small: LanguageModel, kb: KnowledgeBase
) -> None:
    little = StandardRAG(prompt_tokens=200)
    draft = small.generate(QUESTION, method=little, kb=kb, k=3, max_tokens=TOKENS)
    expected = llm.generate(QUESTION, method=StandardRAG(), kb=kb, k=3, max_tokens=TOKENS)
    assert len(draft.sources) < len(expected.sources) == 3
    events, result = told(host, method=Cascade(confidence=1.0, draft_prompt_tokens=200), kb=kb, k=3)
    assert isinstance(result.details, CascadeAnswer)
    assert result.details.draft.text == draft.text
    assert result.text == expected.text
    assert [source.score for source in result.sources] == [source.score for source in expected.sources]
    # What is cited is told: the sources once more, since the small model had room for fewer.
    first, second = (event for event in events if isinstance(event, Sources))
    assert [len(event.sources) for event in (first, second)] == [len(draft.sources), 3]
    assert [one.score for one in second.sources] == [one.score for one in expected.sources]
    assert second.question == first.question == QUESTION
    _, taken = told(host, method=Cascade(confidence=0.0, draft_prompt_tokens=200), kb=kb, k=3)
    assert taken.text == draft.text
    assert taken.retrieved == 3


def test_what_decides_is_the_models_yes_against_its_no(
    host: Answerer, llm: LanguageModel, kb: KnowledgeBase
) -> None:
    _, result = told(host, method=Cascade(confidence=0.0), kb=kb, k=3)
    details = result.details
    assert isinstance(details, CascadeAnswer)
    prompt = check_prompt(Request(QUESTION), details.draft)
    (asked,) = [message["content"] for message in prompt]
    last = max(source.number for source in details.draft.sources if source.cited)
    read = [source.passage.text.strip() in asked for source in details.draft.sources]
    assert read == [source.number <= last for source in details.draft.sources]
    assert "[" not in asked.split("Proposed answer: ")[1]

    session = Session(llm.model)
    run(session.extend(llm.encode(prompt)))
    (row,) = run(session.score(DraftTree(), LOGITS))
    assert row.logits is not None
    yes, no = (llm.tokenizer.encode(word, special=False)[0] for word in ("Yes", "No"))
    expected = 1 / (1 + math.exp(float(row.logits[no]) - float(row.logits[yes])))
    np.testing.assert_allclose(details.verdict.confidence, expected, atol=2e-3)

    level = details.verdict.confidence
    for confidence, taken in ((level - 0.01, True), (level + 0.01, False)):
        _, again = told(host, method=Cascade(confidence=confidence), kb=kb, k=3)
        assert isinstance(again.details, CascadeAnswer)
        assert again.details.verdict.taken is taken


def test_a_follow_up_is_the_models(host: Answerer, llm: LanguageModel, kb: KnowledgeBase) -> None:
    history = [
        {"role": "user", "content": "Who was Marie Curie?"},
        {"role": "assistant", "content": "A physicist [1]."},
        {"role": "user", "content": "Where was she born?"},
    ]
    expected = llm.generate(history, method=StandardRAG(), kb=kb, k=2, max_tokens=TOKENS)
    events, result = told(host, history, method=Cascade(confidence=0.0), kb=kb, k=2)
    assert result.text == expected.text
    assert not any(isinstance(event, Checked) for event in events)


def test_where_nothing_is_found_nobody_is_asked(host: Answerer, kb: KnowledgeBase) -> None:
    events, result = told(host, "How do I reset my router password?", method=Cascade(), kb=kb, k=2)
    assert result.text == ABSTENTION == shown(events)
    assert not any(isinstance(event, Checked) for event in events)


def test_passages_that_are_given(host: Answerer, small: LanguageModel) -> None:
    passages = [Passage(0, "a.md", "Radium", "", "Marie and Pierre Curie discovered radium in 1898.", {})]
    expected = small.generate(QUESTION, method=StandardRAG(), passages=passages, max_tokens=TOKENS)
    _, result = told(host, method=Cascade(confidence=0.0), passages=passages)
    assert result.text == expected.text


@pytest.mark.parametrize("how", [{"index": "bm25"}, {"min_score": -1.0}, {"where": "not title=Tin"}])
def test_a_doubted_answer_is_written_from_what_was_found_before(
    host: Answerer, kb: KnowledgeBase, how: dict[str, Any]
) -> None:
    _, result = told(host, method=Cascade(confidence=1.0), kb=kb, k=2, **how)
    assert isinstance(result.details, CascadeAnswer)
    assert not result.details.verdict.taken
    assert result.text


def test_a_host_that_loads_no_model_has_to_lend_one(llm: LanguageModel, kb: KnowledgeBase) -> None:
    with pytest.raises(InputError, match=r"method: 'cascade' .*serve with --rag-drafter smollm2-135m"):
        Answerer(Resources(llm)).generate(QUESTION, method=Cascade(), kb=kb, k=2)


def test_one_model_is_no_cascade(llm: LanguageModel, kb: KnowledgeBase) -> None:
    with pytest.raises(InputError, match=r"drafter: 'smollm2-135m' .* it is the model itself"):
        llm.generate(QUESTION, method=Cascade(), kb=kb, k=2)
    with pytest.raises(InputError, match="confidence"):
        Cascade(confidence=1.5)
