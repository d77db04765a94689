"""RaLMSpec with a real model over a real knowledge base: token for token and passage for passage the sequential run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pytest

import specrag
from specrag import LanguageModel
from specrag.engine.outputs import LOGITS
from specrag.engine.passes import Coroutine, gather
from specrag.engine.session import Session
from specrag.engine.stopping import StopConditions
from specrag.methods.ralmspec import Iterative
from specrag.methods.ralmspec.prompts import PassagePrompts
from specrag.methods.ralmspec.result import IterativeAnswer
from specrag.methods.ralmspec.text import EarlierPrompts, Text, Writer
from specrag.methods.timeline import Timeline
from specrag.methods.token_decoders import PlainDecoder
from specrag.request import Options
from specrag.retrieval.knowledge_base import KnowledgeBase, SingleIndex
from specrag.retrieval.passage import Passage
from specrag.speculation.decode import Settings
from specrag.speculation.tree import EMPTY
from tests.methods.ralm_toys import outcome, ralmspec, sequential
from tests.methods.run import answer_of
from tests.processor import PACKED_BF16
from tests.sample import build_sample, passages_in_order

TOKENS = 20
#: With queries of 8 tokens its passages change in the middle of an answer.
QUESTION = "Compare Marie Curie and copper: who discovered radium, and which sea does the Danube reach?"
SHORT: dict[str, Any] = {"query_tokens": 8, "passage_tokens": 48}

Stride: TypeAlias = int | Literal["os3", "cost-aware"]
Combination: TypeAlias = tuple[int, Stride, bool, str]
STRIDES: tuple[Stride, ...] = (3, "os3", "cost-aware")
#: Prefetching, stride, asynchronous verification, decoder: each way to choose the first three, and the paper's PSA.
ALL: tuple[Combination, ...] = tuple(product((1, 20), STRIDES, (False, True), ("plain",)))
SOME: tuple[Combination, ...] = ((1, 3, False, "plain"), (20, "os3", True, "plain"))

pytestmark = PACKED_BF16


@pytest.fixture(scope="module")
def kb(model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(build_sample(tmp_path_factory.mktemp("ralm") / "kb")) as kb:
        yield kb


@pytest.fixture(scope="module")
def invariant(smollm2: Path) -> Iterator[LanguageModel]:
    """The small model with 8-bit weights, where a row's bits never depend on the pass."""
    llm = specrag.load("smollm2-135m", dtype="int8", device="cpu", batch_invariant=True)
    yield llm
    llm.close()


@pytest.mark.parametrize(
    ("index", "temperature", "combinations"), [("flat", 0.0, ALL), ("flat", 0.9, SOME), ("bm25", 0.9, SOME)]
)
def test_every_combination_gives_the_sequential_output(
    invariant: LanguageModel,
    kb: KnowledgeBase,
    index: str,
    temperature: float,
    combinations: Sequence[Combination],
) -> None:
    """P, S and A, each on and off, the other baseline, and a speculative decoder inside; all in the same passes."""
    retriever = SingleIndex(kb, index)
    options: Options = {"max_tokens": TOKENS, "temperature": temperature, "seed": 2}
    expected = answer_of(sequential(invariant, retriever, **SHORT), QUESTION, **options)
    wrong = 0
    speculative = [
        ralmspec(
            invariant,
            retriever,
            **SHORT,
            prefetch=prefetch,
            stride=stride,
            asynchronous=asynchronous,
            decoder=decoder,
        )
        for prefetch, stride, asynchronous, decoder in (*combinations, (1, 3, False, "respec"))
    ]
    methods = [sequential(invariant, retriever, **SHORT, reuse=False), *speculative]

    def side_by_side() -> Coroutine[list[IterativeAnswer]]:
        return (yield from gather([method.answering(QUESTION, **options) for method in methods]))

    for answer in invariant.executor.run(invariant.executor.submit(side_by_side())):
        assert outcome(answer) == outcome(expected)
        wrong += sum(round.matched < round.stride for round in answer.rounds)
    assert len(expected.sources) > 1
    assert wrong > 0


def logits(llm: LanguageModel, session: Session) -> np.ndarray:
    def score() -> Coroutine[np.ndarray]:
        rows = yield from session.score(EMPTY, LOGITS)
        assert rows[0].logits is not None
        return rows[0].logits

    found: np.ndarray = llm.executor.run(llm.executor.submit(score()))
    return found


def test_a_session_that_was_taken_back_equals_a_fresh_one(
    invariant: LanguageModel, kb: KnowledgeBase
) -> None:
    """Chunks behind passage A, then B, both taken back, then behind A again: to the bit as if nothing had been."""
    passages: list[Passage] = passages_in_order(kb, 0, 3)
    prompts = PassagePrompts(invariant, QUESTION, Iterative.Options(), TOKENS)
    stop = StopConditions(TOKENS)
    writer = Writer(
        invariant.model,
        PlainDecoder(),
        prompts,
        Settings(stop),
        interval=4,
        earlier=EarlierPrompts(invariant.prefixes),
        timeline=Timeline(lambda: 0.0),
    )
    start = Text.empty(invariant.tokenizer, stop)

    def play() -> Coroutine[Text]:
        first = (yield from writer.write(start, passages[0])).text
        second = (yield from writer.write(first, passages[0])).text
        yield from writer.write(second, passages[1])
        yield from writer.write(second, passages[0])
        again = (yield from writer.write(first, passages[1])).text
        assert again.tokens[:4] == first.tokens
        return (yield from writer.write(first, passages[0])).text

    text = invariant.executor.run(invariant.executor.submit(play()))
    session = writer._sessions[passages[0].id]
    assert session.tokens == [*prompts.tokens(passages[0]), *text.tokens]
    fresh = Session(invariant.model)
    extending = invariant.executor.submit(fresh.extend(session.tokens))
    invariant.executor.run(extending)
    assert logits(invariant, session).tolist() == logits(invariant, fresh).tolist()
    fresh.close()
    others = passages_in_order(kb, 1, 2, 4, 5)
    for passage in others:
        writer.keep([passages[0]])
        invariant.executor.run(invariant.executor.submit(writer.write(start, passage)))
    writer.keep([passages[0]])
    assert [*writer._sessions] == [
        passages[0].id,
        others[2].id,
        others[3].id,
    ]  # the newest, and the one that is needed
    assert writer.holds(passages[0])
    assert not writer.holds(passages[1])
    writer.close()
    assert not writer._sessions


def test_a_prompt_holds_a_cut_passage_and_the_question(invariant: LanguageModel, kb: KnowledgeBase) -> None:
    long = Passage(99, "long.txt", "Metals", "", "Copper conducts heat. " * 200, {})
    reading = Iterative.Options(passage_tokens=40, prompt_tokens=128)
    prompts = PassagePrompts(invariant, "What is tin?", reading, TOKENS)
    text = invariant.tokenizer.decode(prompts.tokens(long))
    assert "Metals\nCopper conducts heat." in text
    assert text.rstrip().endswith("What is tin?\nassistant")
    passage = text.split("Metals")[1].split("\n\nWhat is tin?")[0]
    assert len(invariant.tokenizer.encode(f"Metals{passage}", special=False)) <= 40
    tight = PassagePrompts(invariant, "What is tin?", Iterative.Options(prompt_tokens=80), TOKENS)
    assert 70 <= len(tight.tokens(long)) <= 80
    raw = PassagePrompts(invariant, "Tin is", reading, TOKENS, raw=True)
    assert invariant.tokenizer.decode(raw.tokens(long)).startswith("Metals\nCopper")
    assert invariant.tokenizer.decode(raw.tokens(long)).endswith("\n\nTin is")
    assert raw.query(invariant.tokenizer.encode(" a metal", special=False)) == "Tin is a metal"
    assert prompts.query(invariant.tokenizer.encode("A metal", special=False)) == "What is tin?\nA metal"


def test_the_query_is_the_end_of_the_text(invariant: LanguageModel) -> None:
    prompts = PassagePrompts(invariant, "What is tin?", Iterative.Options(query_tokens=3), TOKENS)
    encode = invariant.tokenizer.encode
    assert prompts.query(encode("It is a very soft metal", special=False)) == "very soft metal"
    blank = encode("\n\n\n\n\n\n", special=False) * 3
    assert prompts.query(blank).startswith("What is tin?")  # a query is never blank
