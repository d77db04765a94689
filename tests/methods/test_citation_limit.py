"""Only passages that are there can be cited, whatever the model would write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from specrag.methods.citations import find_citations
from specrag.methods.prompts import LEAD
from specrag.methods.retriever import GivenPassages
from specrag.methods.standard_rag.citation_limit import CitationLimit
from specrag.methods.standard_rag.pipeline import StandardPipeline
from tests.methods.rag_toys import PASSAGES, QUESTION
from tests.methods.run import answer_of

if TYPE_CHECKING:
    from specrag import LanguageModel


def allowed(limit: CitationLimit, state: str, vocab_size: int) -> np.ndarray:
    return np.flatnonzero(np.isfinite(limit.apply(np.zeros(vocab_size, dtype=np.float32), state)))


@pytest.mark.parametrize(("sources", "written", "right", "wrong"), [
    (10, "", "1234567", "0"),
    (10, "1", "0", "123456789"),
    (3, "", "123", "0456789"),
    (12, "1", "012", "3456789"),
    (12, "2, ", "123456789", "0"),
    (12, "2-", "123456789", "0"),
])  # fmt: skip
def test_a_number_goes_on_only_to_one_that_a_source_has(
    llm: LanguageModel, sources: int, written: str, right: str, wrong: str
) -> None:
    limit = CitationLimit(llm.tokenizer, sources, LEAD)
    state = limit.start([])
    for token in llm.tokenizer.encode(written, special=False):
        state = limit.advance(state, token)
    may_follow = set(allowed(limit, state, llm.tokenizer.vocab_size).tolist())
    for digits, expected in ((right, True), (wrong, False)):
        for digit in digits:
            (token,) = llm.tokenizer.encode(digit, special=False)
            assert (token in may_follow) is expected, (written, digit)


def test_numbers_outside_of_marks_are_free(llm: LanguageModel) -> None:
    limit = CitationLimit(llm.tokenizer, 2, LEAD)
    state = limit.start([])
    for token in llm.tokenizer.encode("2], in 18", special=False):
        state = limit.advance(state, token)
    (nine,) = llm.tokenizer.encode("9", special=False)
    assert nine in allowed(limit, state, llm.tokenizer.vocab_size)


def test_whatever_is_drawn_cites_what_is_there(llm: LanguageModel) -> None:
    """Texts of brackets, digits and separators drawn from what is allowed, and from everything."""
    pieces = [
        llm.tokenizer.encode(text, special=False) for text in ("[", "]", "1", "2", "9", "0", ", ", " a")
    ]
    ids = np.array(sorted({token for piece in pieces for token in piece}))
    generator = np.random.default_rng(0)
    wrong = 0
    for _ in range(30):
        limit = CitationLimit(llm.tokenizer, 12)
        state, kept, free = limit.start([]), [], []
        for _ in range(30):
            possible = np.intersect1d(ids, allowed(limit, state, llm.tokenizer.vocab_size))
            kept.append(int(generator.choice(possible)))
            free.append(int(generator.choice(ids)))
            state = limit.advance(state, kept[-1])
        assert not find_citations(llm.tokenizer.decode(kept), [""] * 12).invalid
        wrong += bool(find_citations(llm.tokenizer.decode(free), [""] * 12).invalid)
    assert wrong > 3


@pytest.mark.parametrize("method", ["plain", "respec", "prompt-lookup"])
def test_an_answer_cites_what_it_was_given(llm: LanguageModel, method: str) -> None:
    """A model that is drawn to a number with all its might cites another one."""
    rag = StandardPipeline(llm, GivenPassages(PASSAGES[:2]), k=2, index="given", min_score=None)
    (seven,) = llm.tokenizer.encode("7", special=False)
    answer = answer_of(rag, QUESTION, max_tokens=12, method=method, logit_bias={seven: 20.0})
    assert not answer.citations.invalid
    assert answer.citations.numbers
    assert "7" in answer.text, "the bias is at work"
