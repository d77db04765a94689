"""Methods that are given their model and knowledge base, and how what Python holds is shown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import specrag
from specrag import InputError
from specrag.request import Result, Source
from specrag.retrieval.passage import Passage
from tests.sample import build_sample

if TYPE_CHECKING:
    from specrag import LanguageModel

QUESTION = "Who discovered radium?"
SHORT: dict[type[specrag.Method], dict[str, Any]] = {
    specrag.StandardRAG: {},
    specrag.Sequential: {"interval": 3},
    specrag.RaLMSpec: {"interval": 3, "stride": 2},
    specrag.SpeculativeRAG: {"drafts": 1, "passages_per_draft": 1, "draft_tokens": 16, "strategy": "random"},
}


@pytest.fixture(scope="module")
def kb(model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[specrag.KnowledgeBase]:
    with specrag.KnowledgeBase.open(build_sample(tmp_path_factory.mktemp("kb") / "kb")) as base:
        yield base


@pytest.mark.parametrize("method", SHORT)
def test_a_method_with_its_model_answers_as_the_model_by_that_method(
    method: type[specrag.Method], llm: LanguageModel, kb: specrag.KnowledgeBase
) -> None:
    options = SHORT[method]
    expected = llm.generate(QUESTION, kb=kb, method=method(**options), max_tokens=8)
    bound = method(llm, kb, **options)
    assert bound.generate(QUESTION, max_tokens=8).text == expected.text
    assert method(llm, kb.folder, **options).generate(QUESTION, max_tokens=8).text == expected.text
    again = asyncio.run(bound.agenerate(QUESTION, max_tokens=8))
    assert (again.text, again.retrieved) == (expected.text, expected.retrieved)


def test_defaults_are_the_methods_own(llm: LanguageModel, kb: specrag.KnowledgeBase) -> None:
    assert specrag.RaLMSpec(llm, kb).options == specrag.RaLMSpec().options
    result = specrag.RaLMSpec(llm, kb).generate(QUESTION, max_tokens=4)
    assert result.text
    assert result.sources


def test_a_method_of_tokens_needs_a_model_only(llm: LanguageModel) -> None:
    prompt = "The capital of France is"
    expected = llm.generate(prompt, raw=True, max_tokens=6)
    assert specrag.Adaptive(llm).generate(prompt, raw=True, max_tokens=6).text == expected.text
    steps = list(specrag.Plain(llm).stream(prompt, raw=True, max_tokens=6))
    assert "".join(step.text for step in steps if isinstance(step, specrag.Step)) == expected.text


def test_what_is_missing_is_named(llm: LanguageModel, kb: specrag.KnowledgeBase) -> None:
    with pytest.raises(InputError, match=r"^llm: None .* RaLMSpec\(llm, kb\), or llm\.generate"):
        specrag.RaLMSpec().generate(QUESTION)
    with pytest.raises(InputError, match=r"^llm: KnowledgeBase\("):
        specrag.RaLMSpec(kb)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^kb: .*RaLMSpec\(llm, kb\)"):
        specrag.RaLMSpec(kb=kb)
    with pytest.raises(InputError, match=r"^kb: None .* name a knowledge base"):
        specrag.RaLMSpec(llm).generate(QUESTION)
    with pytest.raises(InputError, match=r"^method: 'plain' .* RaLMSpec answers"):
        specrag.RaLMSpec(llm, kb).generate(QUESTION, method="plain")
    with pytest.raises(InputError, match="did you mean stride"):
        specrag.RaLMSpec(llm, kb, strid=3)


def test_what_python_shows(llm: LanguageModel, kb: specrag.KnowledgeBase) -> None:
    assert repr(specrag.RaLMSpec(llm, kb, stride=3, early=True)) == "RaLMSpec(stride=3, early=True)"
    assert repr(specrag.Adaptive()) == "Adaptive()"
    assert repr(llm) == "LanguageModel('smollm2-135m', dtype='int8', device='cpu')"
    made = kb.state
    assert (
        repr(kb) == f"KnowledgeBase({str(kb.folder)!r}, documents={made.documents}, passages={made.passages})"
    )
    result = llm.generate(QUESTION, kb=kb, max_tokens=6)
    shown = repr(replace(result, text=f"{'word ' * 40}\nend"))
    assert shown.startswith("Result('word word ")
    assert shown.endswith(f" …', finish_reason={result.finish_reason!r}, tokens=6, sources=5)")
    assert len(shown) < 140


def test_a_result_in_a_notebook_is_the_answer_with_its_sources(
    llm: LanguageModel, kb: specrag.KnowledgeBase
) -> None:
    plain = llm.generate("Say hello.", max_tokens=2)
    assert plain._repr_markdown_() == plain.text

    def source(number: int, title: str, cited: bool) -> Source:
        passage = Passage(number, "/srv/notes.md", title, "page 3", "text", {})
        return Source(number, passage, 0.5, cited=cited)

    sources = (source(1, "Tin", True), source(2, "<b>*Zinc*</b>\n# x", False))
    shown = Result("Tin melts [1].", (), "stop", plain.usage, plain.timing, sources)._repr_markdown_()
    assert shown == (
        "Tin melts [1].\n\n- \\[1\\] **Tin**, notes.md, page 3 (used)\n"
        "- \\[2\\] \\<b\\>\\*Zinc\\*\\</b\\> \\# x, notes.md, page 3"
    )
    nothing = llm.generate("How do I reset my router password?", kb=kb)
    assert nothing.sources
    assert nothing._repr_markdown_() == nothing.text  # sources that were found and not used
