"""Standard RAG with a real model over a real knowledge base."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from specrag.engine.passes import Coroutine, Emit, Search, gather
from specrag.errors import Cancelled, ContextLengthError, DeadlineExceeded, InputError
from specrag.methods.events import suppress_events
from specrag.methods.evidence import usual_min_score
from specrag.methods.prompts import LEAD
from specrag.methods.retriever import GivenPassages
from specrag.methods.standard_rag import StandardRAG
from specrag.methods.standard_rag.pipeline import StandardPipeline
from specrag.methods.standard_rag.result import Answer
from specrag.request import ABSTENTION, Result, Sources
from specrag.retrieval.knowledge_base import KnowledgeBase
from specrag.retrieval.passage import Hit, Passage
from specrag.speculation.decode import Step
from tests.methods.rag_toys import standard
from tests.methods.run import answer_of, events_of, play
from tests.sample import build_sample, passages_in_order

if TYPE_CHECKING:
    from specrag import LanguageModel
    from specrag.retrieval.encoder import Reranker

QUESTION = "Who discovered radium?"
OFF_TOPIC = "How do I reset my router password?"


@pytest.fixture(scope="module")
def kb(model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(build_sample(tmp_path_factory.mktemp("kb") / "kb")) as kb:
        yield kb


@pytest.fixture(scope="module")
def rag(llm: LanguageModel, kb: KnowledgeBase) -> StandardPipeline:
    return standard(llm, kb, k=3)


@pytest.fixture(scope="module")
def expected(rag: StandardPipeline) -> Answer:
    answer = answer_of(rag, QUESTION, max_tokens=24)
    assert isinstance(answer, Answer)
    return answer


def texts(events: Sequence[object]) -> str:
    return "".join(event.text for event in events if isinstance(event, Step))


def test_answer_is_cited_and_its_source_is_the_right_one(expected: Answer, kb: KnowledgeBase) -> None:
    assert "Marie Curie" in expected.text
    assert not expected.text.startswith(LEAD.removesuffix("["))
    assert expected.text.endswith("]")
    assert not expected.abstained
    assert [source.number for source in expected.sources] == [1, 2, 3]
    cited = [source for source in expected.sources if source.cited]
    assert tuple(source.number for source in cited) == expected.citations.numbers
    assert "Marie Curie" in cited[0].passage.title
    assert expected.citations.found[0].supported
    assert expected.citations.invalid == ()
    assert max(expected.sources, key=lambda source: source.support or 0) == cited[0]
    scores = [source.score for source in expected.sources]
    assert scores == sorted(scores, reverse=True)
    similar = [source.similarity for source in expected.sources if source.similarity is not None]
    assert usual_min_score(len(kb)) <= max(similar) <= 1


def test_stats_add_up(expected: Answer) -> None:
    stats, generation = expected.stats, expected.generation
    assert generation is not None
    assert (stats.prompt_tokens, stats.completion_tokens) == (
        generation.usage.prompt_tokens,
        generation.usage.completion_tokens,
    )
    assert stats.rewrite_seconds < 0.01
    assert stats.retrieval_seconds > 0
    assert stats.total_seconds >= stats.retrieval_seconds + generation.timing.total
    assert stats.tokens_per_second == pytest.approx(stats.completion_tokens / stats.decode_seconds)


def test_stream_gives_the_sources_first_and_then_the_text(rag: StandardPipeline, expected: Answer) -> None:
    stream = play(rag, QUESTION, max_tokens=24)
    events, answer = stream.events, stream.answer
    assert isinstance(events[0], Sources)
    assert all(isinstance(event, Step) for event in events[1:])
    assert texts(events).strip() == answer.text == expected.text
    assert [source.passage for source in events[0].sources] == [source.passage for source in answer.sources]


def test_asynchronous_calls_give_the_same(llm: LanguageModel, kb: KnowledgeBase, expected: Answer) -> None:
    call: dict[str, Any] = {"kb": kb, "k": 3, "max_tokens": 24, "method": StandardRAG(decoder="plain")}

    async def ask() -> tuple[Result, list[object]]:
        events: list[object] = [event async for event in llm.astream(QUESTION, **call)]
        return await llm.agenerate(QUESTION, **call), events

    answer, events = asyncio.run(ask())
    assert answer.text == expected.text
    assert isinstance(events[0], Sources)
    assert isinstance(events[-1], Result)
    assert events[-1].text == expected.text == texts(events).strip()
    assert isinstance(answer.details, Answer)
    assert answer.details.citations == expected.citations


def test_nothing_relevant_is_no_answer(rag: StandardPipeline, llm: LanguageModel, kb: KnowledgeBase) -> None:
    events: list[object] = list(events_of(rag, OFF_TOPIC))
    assert texts(events) == ABSTENTION
    answer = answer_of(rag, OFF_TOPIC)
    assert answer.abstained
    assert (answer.text, answer.generation, answer.stats.completion_tokens) == (ABSTENTION, None, 0)
    assert len(answer.sources) == 3  # what was found all the same, for those who wonder
    assert answer.least_similarity == usual_min_score(len(kb))
    assert max(source.similarity or 0 for source in answer.sources) < answer.least_similarity
    assert f"below {answer.least_similarity:.2f}; with abstain=false" in answer.notes()[0]
    insisted = answer_of(standard(llm, kb, k=1, abstain=False), OFF_TOPIC, max_tokens=4)
    assert not insisted.abstained
    assert insisted.generation is not None


def test_words_that_no_passage_holds_find_nothing(llm: LanguageModel, kb: KnowledgeBase) -> None:
    answer = answer_of(standard(llm, kb, index="bm25", abstain=False), "xyzzy plugh")
    assert answer.abstained
    assert answer.sources == ()


@pytest.mark.parametrize("index", ["flat", "hnsw", "bm25", "hybrid"])
def test_every_index_finds_the_source(llm: LanguageModel, kb: KnowledgeBase, index: str) -> None:
    answer = answer_of(standard(llm, kb, k=1, index=index), "Which sea does the Danube reach?", max_tokens=1)
    assert [source.passage.title for source in answer.sources] == ["Danube"]


def test_conditions_choose_the_passages(llm: LanguageModel, kb: KnowledgeBase) -> None:
    rag = standard(llm, kb, k=3, where={"title": ["Tin", "Bronze"]}, abstain=False)
    answer = answer_of(rag, QUESTION, max_tokens=1)
    assert {source.passage.title for source in answer.sources} == {"Tin", "Bronze"}


def test_a_follow_up_is_searched_for_with_the_conversation(
    rag: StandardPipeline, llm: LanguageModel, kb: KnowledgeBase
) -> None:
    history = [
        {"role": "user", "content": "Who was Marie Curie?"},
        {"role": "assistant", "content": "According to passage [1], Marie Curie was a physicist."},
    ]
    question = "Which prizes did she win?"
    answer = answer_of(rag, question, history, max_tokens=24)
    assert question in answer.question  # the user's own words are in it
    assert "Curie" in answer.question
    assert answer.sources[0].passage.title == "Marie Curie"
    assert answer.stats.rewrite_seconds > 0.01
    events: list[object] = list(events_of(rag, question, history, max_tokens=24))
    assert texts(events).strip() == answer.text  # nothing of the rewriting is shown
    plain = answer_of(standard(llm, kb, k=3, rewrite=False, abstain=False), question, history, max_tokens=1)
    assert plain.question == question
    assert plain.stats.rewrite_seconds < 0.01


def test_what_does_not_fit_is_left_out_from_the_end(llm: LanguageModel, kb: KnowledgeBase) -> None:
    whole = answer_of(standard(llm, kb, k=3), QUESTION, max_tokens=1)
    room = whole.stats.prompt_tokens - 1
    less = answer_of(standard(llm, kb, StandardRAG.Options(prompt_tokens=room), k=3), QUESTION, max_tokens=1)
    assert less.stats.prompt_tokens <= room
    assert [source.passage for source in less.sources] == [source.passage for source in whole.sources[:2]]
    assert [hit.passage for hit in less.left_out] == [whole.sources[2].passage]
    assert not less.shortened
    tight = answer_of(standard(llm, kb, StandardRAG.Options(prompt_tokens=130), k=3), QUESTION, max_tokens=1)
    assert tight.shortened
    assert tight.stats.prompt_tokens <= 130
    assert (len(tight.sources), len(tight.left_out)) == (1, 2)


def test_a_question_longer_than_the_context_is_refused_before_any_work(
    llm: LanguageModel, kb: KnowledgeBase
) -> None:
    class Unsearched(GivenPassages):
        def search(self, *_: Any, **__: Any) -> list[list[Hit]]:
            raise AssertionError("searched for a question that cannot be asked")

    rag = standard(llm, Unsearched(passages_in_order(kb, 0)), k=1, abstain=False)
    with pytest.raises(ContextLengthError, match="shorten the question"):
        answer_of(rag, "why " * 9000)
    with pytest.raises(ContextLengthError):
        answer_of(rag, "why?", max_tokens=llm.context_length)


def test_a_model_without_a_chat_template_gets_a_text(llm: LanguageModel, kb: KnowledgeBase) -> None:
    answer = answer_of(standard(llm, kb, k=2), QUESTION, raw=True, max_tokens=40)
    assert "\n" not in answer.text
    assert answer.citations.numbers


@pytest.mark.parametrize(
    ("question", "label"), [(QUESTION, "Question"), ("Wer hat das Radium entdeckt?", "Frage")]
)
def test_a_small_model_s_answer_ends_before_a_question_of_its_own(
    llm: LanguageModel, kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch, question: str, label: str
) -> None:
    seen: list[Any] = []
    generating = llm.generating

    def seeing(prompt: Any, options: Any, *more: Any) -> Any:
        seen.append(options)
        return generating(prompt, options, *more)

    monkeypatch.setattr(llm, "generating", seeing)
    answer_of(standard(llm, kb, k=2), question, max_tokens=8, stop="Pierre")
    assert seen[0]["stop"] == ("Pierre", f"\n\n{label}:", f"\n{label}:")
    monkeypatch.setattr("specrag.methods.standard_rag.pipeline.is_small", lambda _: False)
    answer_of(standard(llm, kb, k=2), question, max_tokens=8)
    assert "stop" not in seen[1]


class Waiting(GivenPassages):
    """Finds nothing before somebody else's text has come."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        super().__init__(passages)
        self.other_has_decoded = threading.Event()

    def search(self, *words: Any, **options: Any) -> list[list[Hit]]:
        assert self.other_has_decoded.wait(timeout=60)
        return super().search(*words, **options)


def test_others_decode_during_a_search(exact_llm: LanguageModel, kb: KnowledgeBase) -> None:
    llm = exact_llm
    waiting = Waiting(passages_in_order(kb, 0, 1))
    slow = standard(llm, waiting, k=2, abstain=False)
    quick = standard(llm, GivenPassages(passages_in_order(kb, 0, 1)), k=2, abstain=False)
    alone = answer_of(quick, QUESTION, max_tokens=6)

    def both() -> Coroutine[list[Answer]]:
        return (
            yield from gather(
                [slow.answering(QUESTION, max_tokens=6), quick.answering(QUESTION, max_tokens=6)]
            )
        )

    task = llm.executor.submit(both())
    for event in llm.executor.stream(task):
        if isinstance(event, Step) and event.tokens:
            waiting.other_has_decoded.set()
    assert [answer.text for answer in task.result()] == [alone.text] * 2


class Failing(GivenPassages):
    def search(self, *_: Any, **__: Any) -> list[list[Hit]]:
        raise InputError("where", "colour", "there is no such field")


def test_an_error_of_the_search_is_the_caller_s(llm: LanguageModel, kb: KnowledgeBase) -> None:
    with pytest.raises(InputError, match="colour"):
        answer_of(standard(llm, Failing(passages_in_order(kb, 0)), k=1, abstain=False), QUESTION)


def test_a_timeout_ends_an_answer(rag: StandardPipeline) -> None:
    with pytest.raises(DeadlineExceeded):
        answer_of(rag, QUESTION, timeout=0.001)


def test_leaving_a_stream_ends_the_request(rag: StandardPipeline) -> None:
    stream = events_of(rag, QUESTION, max_tokens=2000, ignore_eos=True)
    assert isinstance(next(stream), Sources)
    stream.close()
    assert "Marie Curie" in answer_of(rag, QUESTION, max_tokens=24).text


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"k": 0}, "k"),
        ({"k": 26}, "k"),
        ({"k": True}, "k"),
        ({"k": 2.5}, "k"),
        ({"min_score": 1.5}, "min_score"),
        ({"min_score": float("nan")}, "min_score"),
        ({"min_score": "high"}, "min_score"),
        ({"index": "flatt"}, "index"),
    ],
)
def test_settings_that_cannot_be_used(
    llm: LanguageModel, kb: KnowledgeBase, settings: Mapping[str, Any], field: str
) -> None:
    with pytest.raises(InputError, match=field) as caught:
        llm.generate(QUESTION, kb=kb, **settings)
    assert "\n" not in str(caught.value)


def test_only_a_knowledge_base_has_a_threshold(llm: LanguageModel) -> None:
    found = GivenPassages([Passage(0, "a.md", "Radium", "", "The Curies discovered radium in 1898.", {})])
    with pytest.raises(InputError, match=r"min_score: 0\.5 .* only a knowledge base has a threshold"):
        llm.generate(QUESTION, kb=found, min_score=0.5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"min_score": 0.5}, r"^min_score: 0\.5 .* only a knowledge base has a threshold"),
        ({"index": "bm25"}, "^index: 'bm25' .* only a knowledge base has several"),
        ({"where": "year=1898"}, "^where: .* these passages have been found already"),
        ({"rerank": "no-such-model"}, "^rerank: 'no-such-model' .* these passages have been ranked already"),
    ],
)
def test_given_passages_are_not_searched(llm: LanguageModel, settings: dict[str, Any], said: str) -> None:
    given = [Passage(0, "a.md", "Radium", "", "The Curies discovered radium in 1898.", {})]
    with pytest.raises(InputError, match=said):
        llm.generate(QUESTION, passages=given, **settings)


def test_a_method_that_decodes_reads_given_passages(llm: LanguageModel) -> None:
    given = [Passage(0, "a.md", "Radium", "", "The Curies discovered radium in 1898.", {})]
    expected = llm.generate(QUESTION, passages=given, method=StandardRAG(decoder="plain"), max_tokens=16)
    found = llm.generate(QUESTION, passages=given, method="plain", max_tokens=16)
    assert found.text == expected.text
    assert [source.passage for source in found.sources] == given
    with pytest.raises(InputError, match=r"^passages: .* give at least one passage"):
        llm.generate(QUESTION, passages=[], method="plain")


def test_a_long_given_passage_is_read_whole(llm: LanguageModel) -> None:
    text = " ".join(f"The Curies discovered element {number} in 1898." for number in range(150))
    given = [Passage(0, "a.md", "Radium", "", text, {})]
    assert len(llm.encode(text, raw=True)) > 1500
    found = llm.generate(QUESTION, passages=given, max_tokens=1)
    assert isinstance(found.details, Answer)
    assert not found.details.shortened
    assert found.usage.prompt_tokens > 1500


def test_given_passages_are_not_ordered_anew() -> None:
    given = GivenPassages([Passage(0, "a.md", "Radium", "", "The Curies discovered radium in 1898.", {})])
    with pytest.raises(InputError, match=r"^rerank: .* ranked already"):
        given.search([QUESTION], reranker=cast("Reranker", object()))


def test_options_that_cannot_be_used() -> None:
    with pytest.raises(InputError, match=r"^prompt_tokens: 0 is not usable: give a whole number from 1 "):
        StandardRAG(prompt_tokens=0)


def test_calls_that_cannot_be_used(rag: StandardPipeline) -> None:
    for question in ("", " \n", None):
        with pytest.raises(InputError, match="question"):
            answer_of(rag, question)
    with pytest.raises(InputError, match="did you mean temperature"):
        answer_of(rag, QUESTION, tempreature=1)
    with pytest.raises(InputError, match="history"):
        answer_of(rag, QUESTION, [{"role": "robot", "content": "x"}])


def test_quietly_passes_on_everything_but_messages() -> None:
    def part() -> Coroutine[str]:
        yield Emit("secret")
        found = yield Search(lambda: None)
        yield Emit("secret too")
        try:
            yield Search(lambda: None)
        except Cancelled:
            return f"{found}, then cancelled"
        return "never"

    coroutine = suppress_events(part())
    assert isinstance(next(coroutine), Search)
    assert isinstance(coroutine.send("found"), Search)
    with pytest.raises(StopIteration) as end:
        coroutine.throw(Cancelled("enough"))
    assert end.value.value == "found, then cancelled"


def test_given_passages_keep_their_order(kb: KnowledgeBase) -> None:
    passages = passages_in_order(kb, 4, 2, 7)
    given = GivenPassages(passages)
    first, second = given.search(["a", "b"], 2)
    assert [hit.passage for hit in first] == passages[:2]
    assert first == second
    with pytest.raises(InputError, match="where"):
        given.search(["a"], where={"title": "Tin"})
