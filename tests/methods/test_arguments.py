"""What is told to those who give a method a folder, or one kind of retriever in place of the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import specrag
from specrag.methods.knn_lm import KnnLM
from specrag.methods.knn_lm.decoder import KnnDecoder
from specrag.methods.passages import retrieval
from specrag.methods.resources import Resources
from specrag.request import Request
from specrag.retrieval.build import build
from specrag.retrieval.knowledge_base import SingleIndex
from tests.methods.ralm_toys import (
    ToyRetriever,
    WholeContextModel,
    outcome,
    ralmspec,
    sequential,
    toy_llm,
)
from tests.methods.run import answer_of

ITERATIVE: tuple[Callable[..., Any], ...] = (ralmspec, sequential)


def once(_: object, base: Any) -> object:
    """What is searched once for an answer."""
    return retrieval(Request("Why?"), Resources(retriever=base), "standard-rag")


@pytest.mark.parametrize("folder", ["notes-kb", Path("notes-kb")])
@pytest.mark.parametrize(
    ("make", "argument"),
    [
        *((make, "retriever") for make in ITERATIVE),
        (once, "knowledge_base"),
    ],
)
def test_a_folder_has_to_be_opened(make: Callable[..., Any], argument: str, folder: object) -> None:
    with pytest.raises(specrag.InputError) as caught:
        make(None, folder)
    told = str(caught.value)
    assert told.startswith(f"{argument}: ")
    assert "specrag.KnowledgeBase.open('notes-kb')" in told


def test_a_datastore_has_to_be_opened() -> None:
    with pytest.raises(specrag.InputError, match=r"^datastore: 'store' .* Datastore\.open"):
        KnnDecoder("store", KnnLM.Options())  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["standard-rag", "speculative-rag"])
def test_what_takes_encoded_queries_is_no_knowledge_base(method: str) -> None:
    llm = toy_llm(WholeContextModel(3))
    with pytest.raises(specrag.InputError, match=r"^knowledge_base: .* give a specrag\.KnowledgeBase"):
        llm.generate("ab cd", kb=ToyRetriever(1), method=method)
    llm.close()


@pytest.mark.parametrize("make", ITERATIVE)
def test_what_takes_no_encoded_queries_is_no_passage_retriever(make: Callable[..., Any]) -> None:
    from specrag.methods.retriever import GivenPassages

    with pytest.raises(
        specrag.InputError, match=r"^retriever: .* give a specrag\.KnowledgeBase or a SingleIndex"
    ):
        make(None, GivenPassages([]))


@pytest.mark.parametrize("method", ["sequential", "ralmspec"])
@pytest.mark.parametrize("asked", [{"rerank": "a-cross-encoder"}, {"min_score": 0.3}])
def test_what_is_found_every_few_tokens_is_neither_ordered_anew_nor_refused(
    method: str, asked: dict[str, Any]
) -> None:
    llm = toy_llm(WholeContextModel(3))
    [name] = asked
    with pytest.raises(specrag.InputError, match=rf"^{name}: .* this method searches every few tokens"):
        llm.generate("ab cd", kb=ToyRetriever(1), method=method, **asked)
    llm.close()


@pytest.mark.parametrize("make", ITERATIVE)
def test_a_knowledge_base_is_searched_by_its_vectors(make: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "metals.md").write_text(
        "# Tin\n\nTin melts.\n\n# Copper\n\nCopper is red.\n", encoding="utf-8"
    )
    build([tmp_path / "metals.md"], tmp_path / "kb")
    llm = toy_llm(WholeContextModel(3))
    with specrag.KnowledgeBase.open(tmp_path / "kb") as base:
        answers = [answer_of(make(llm, given), "ab cd", max_tokens=12) for given in (base, SingleIndex(base))]
    llm.close()
    assert outcome(answers[0]) == outcome(answers[1])
