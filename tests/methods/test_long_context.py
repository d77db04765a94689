"""Long contexts with a real model: the same text whoever guesses, nothing read twice, and what does not fit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import specrag
from specrag.errors import ContextLengthError, DeadlineExceeded, InputError
from specrag.methods.decoding import DecodingMethod
from specrag.methods.prefixes import identity_of
from specrag.methods.rapid import ContextOptions
from specrag.methods.rapid.context.retriever import ContextRetriever, ContextSettings
from specrag.methods.rapid.decoder import RapidDecoder, Reading
from specrag.methods.rapid.long_context import LongContextPipeline
from specrag.methods.rapid.planner import NOTHING_LEFT_OUT, LongQuestion, ReadingPlanner, both_ends
from specrag.methods.rapid.prompt import GAP, ContextQuestion, encode, whole_text
from specrag.methods.rapid.readers import context_method
from specrag.methods.rapid.result import ContextReading
from specrag.methods.registry import make_method
from specrag.methods.resources import Resources
from specrag.models.catalog import resolve
from specrag.models.loading import LoadedModel, load_model
from specrag.models.tokenizer import Tokenizer
from specrag.retrieval.documents.contexts import documents_of
from specrag.retrieval.documents.reader import Document
from specrag.speculation.decode import Step
from tests.methods.run import answer_of, events_of, play
from tests.sample import SUMMARIES

QUESTION = "Who discovered radium, and when?"
SECOND = "Which prizes did she win?"
TITLES = ("Danube", "Photosynthesis", "Alexander Fleming", "Marie Curie")
SMALL = ContextSettings(chunk_tokens=64, min_tokens=130, max_tokens=130)


@pytest.fixture(scope="module")
def loaded(model_home: Path) -> LoadedModel:
    """SmolLM2 in fp32, where near-ties are rare enough to compare texts."""
    return load_model("smollm2-135m", dtype="fp32", device="cpu")


@pytest.fixture
def target(loaded: LoadedModel) -> Iterator[specrag.LanguageModel]:
    """A language model that has read nothing yet."""
    model = specrag.LanguageModel(loaded)
    yield model
    model.close()


@pytest.fixture(scope="module")
def retriever(model_home: Path) -> ContextRetriever:
    return ContextRetriever(SMALL)


@pytest.fixture(scope="module")
def documents() -> tuple[Document, ...]:
    """Four Wikipedia summaries, about 600 tokens."""
    named = {document.title: document for document in documents_of(SUMMARIES)}
    return tuple(named[title] for title in TITLES)


def make(
    target: specrag.LanguageModel,
    method: str,
    retriever: ContextRetriever,
    *,
    holds: bool = True,
    folder: Path | None = None,
    **values: Any,
) -> LongContextPipeline:
    """What answers as this method, with these options; keeps the newest document unless ``holds`` is false."""
    given = Resources(target, holds_documents=holds)
    return LongContextPipeline(
        target,
        retriever,
        ContextOptions(**values),
        how(method, given),
        prefixes=given.kept_prefixes(folder),
    )


def release(pipeline: LongContextPipeline) -> None:
    """Forget the document whose keys and values are held in memory."""
    assert pipeline._prefixes is not None
    pipeline._prefixes.release()


def how(name: str, given: Resources) -> Any:
    """Who decodes or drafts; ``cost-aware`` is RAPID so scheduled, ``part`` the target that reads the part."""
    own = {"cost-aware": specrag.RAPID(schedule="cost-aware"), "part": specrag.LongContext(read="part")}
    method = own.get(name) or make_method(name)
    return method.decoder(given) if isinstance(method, DecodingMethod) else method._method(given)  # type: ignore[attr-defined]


# -- the answer ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_lossless_method_writes_the_plain_text_and_reads_the_documents_once(
    target: specrag.LanguageModel, retriever: ContextRetriever, documents: tuple[Document, ...]
) -> None:
    plain = make(target, "plain", retriever)
    expected = answer_of(plain, QUESTION, documents, max_tokens=12)
    assert expected.reading.method == "plain"
    assert expected.reading.part is None
    assert expected.stats.drafter_tokens == 0
    prompt = encode(target.tokenizer, plain_question().about_text(whole_text(documents)))
    assert expected.stats.prompt_tokens == len(prompt) > 400
    assert [token.token for token in expected.generation.tokens] == [
        token.token for token in target.generate(prompt, max_tokens=12, method="plain").tokens
    ]
    lossless = {
        "cost-aware": 12,
        "adaptive": 12,
        "respec": 12,
        "rapid": 4,
        "naive-sd": 4,
        "streaming-drafter": 4,
    }
    for method, count in lossless.items():
        answer = answer_of(make(target, method, retriever), QUESTION, documents, max_tokens=count)
        assert [token.token for token in answer.generation.tokens] == [
            token.token for token in expected.generation.tokens[:count]
        ], method
        assert answer.reading.method == method.replace("cost-aware", "rapid")
        assert answer.reading.fallback == ""
        # What the first one read is still held.
        assert answer.stats.cached_tokens > len(prompt) - 40, method
        if method in ("cost-aware", "rapid", "naive-sd"):
            assert 0 < answer.reading.drafter_tokens < 250
            # A cost-aware schedule may find that copies do.
            asked = method != "cost-aware" or answer.stats.drafter_tokens > 0
            assert answer.stats.drafter_tokens == asked * answer.reading.drafter_tokens
            assert (answer.stats.drafter_prefill_seconds > 0) == asked


def plain_question(question: str = QUESTION) -> ContextQuestion:
    return ContextQuestion(question)


def test_the_part_is_told_in_document_order_with_times_apart(
    target: specrag.LanguageModel, retriever: ContextRetriever, documents: tuple[Document, ...]
) -> None:
    long = make(target, "part", retriever)
    stream = play(long, QUESTION, documents, max_tokens=16)
    reading, *steps = stream.events
    answer = stream.answer
    assert isinstance(reading, ContextReading)
    assert reading.part is not None
    assert reading.prompt_tokens < 250 < reading.part.context_tokens
    assert reading.part.tokens <= 130
    numbers = [scored.number for scored in reading.chunks]
    assert numbers == sorted(numbers)
    best = max(reading.chunks, key=lambda scored: scored.score)
    assert "radium" in best.chunk.text
    assert "Curie" in best.chunk.title
    assert all(isinstance(step, Step) for step in steps)
    assert "".join(step.text for step in steps if isinstance(step, Step)).strip() == answer.text
    stats = answer.stats
    assert stats.retrieval_seconds > 0
    assert stats.prefill_seconds > 0
    assert stats.completion_tokens == len(answer.generation.tokens)
    assert stats.total_seconds >= stats.prefill_seconds + stats.decode_seconds + stats.retrieval_seconds
    assert stats.tokens_per_second == pytest.approx(stats.completion_tokens / stats.decode_seconds)
    with pytest.raises(DeadlineExceeded):
        answer_of(long, QUESTION, documents, timeout=1e-6)


def test_asynchronous_calls_end_with_the_answer(
    target: specrag.LanguageModel, retriever: ContextRetriever, documents: tuple[Document, ...]
) -> None:
    part = specrag.LongContext(read="part")

    async def ask() -> tuple[specrag.Result, list[object]]:
        call: dict[str, Any] = {"documents": documents, "method": part, "max_tokens": 8}
        events: list[object] = [event async for event in target.astream(QUESTION, **call)]
        return await target.agenerate(QUESTION, **call), events

    answer, events = asyncio.run(ask())
    assert isinstance(events[0], ContextReading)
    assert isinstance(events[-1], specrag.Result)
    shown = "".join(event.text for event in events if isinstance(event, Step))
    assert answer.text == events[-1].text == shown.strip()


# -- nothing read twice -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_question_reads_only_itself(
    target: specrag.LanguageModel, retriever: ContextRetriever, documents: tuple[Document, ...]
) -> None:
    long, some = make(target, "plain", retriever), documents[-2:]
    first = answer_of(long, QUESTION, some, max_tokens=2)
    assert first.stats.cached_tokens == 0
    second = answer_of(long, SECOND, some, max_tokens=6)
    assert second.stats.prompt_tokens > 200
    assert second.stats.prompt_tokens - second.stats.cached_tokens < 40
    fresh = specrag.LanguageModel(target.loaded)
    assert (
        answer_of(make(fresh, "plain", retriever, holds=False), SECOND, some, max_tokens=6).text
        == second.text
    )
    follow_up = answer_of(
        long,
        SECOND,
        some,
        history=[{"role": "user", "content": QUESTION}, {"role": "assistant", "content": first.text}],
        max_tokens=2,
    )
    assert follow_up.stats.cached_tokens > 200
    release(long)
    assert answer_of(long, SECOND, documents[-1], max_tokens=1).stats.cached_tokens == 0


@pytest.mark.slow
def test_prefixes_on_disk_serve_another_process_and_damage_costs_time_only(
    target: specrag.LanguageModel,
    retriever: ContextRetriever,
    documents: tuple[Document, ...],
    tmp_path: Path,
) -> None:
    some = documents[-2:]
    first = answer_of(make(target, "plain", retriever, folder=tmp_path), QUESTION, some, max_tokens=6)
    (kept,) = tmp_path.glob("*.safetensors")
    another = specrag.LanguageModel(target.loaded)
    long = make(another, "plain", retriever, folder=tmp_path)
    second = answer_of(long, QUESTION, some, max_tokens=6)
    assert second.text == first.text
    assert first.stats.cached_tokens == 0
    assert second.stats.cached_tokens > second.stats.prompt_tokens - 40
    assert second.prefix_note == ""
    data = bytearray(kept.read_bytes())
    data[len(data) // 2] ^= 1
    kept.write_bytes(data)
    release(long)
    third = answer_of(long, QUESTION, some, max_tokens=6)
    assert "its checksum is wrong" in third.prefix_note
    assert third.text == first.text
    assert third.stats.cached_tokens == 0
    release(long)
    assert answer_of(long, QUESTION, some, max_tokens=2).prefix_note == ""  # it was written anew


def test_an_identity_tells_models_apart(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = identity_of(loaded)
    assert own == identity_of(replace(loaded))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    for other in (replace(loaded, dtype="bf16"), replace(loaded, adapter=tmp_path)):
        assert identity_of(other) != own
    merged = identity_of(replace(loaded, adapter=tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"others")
    assert identity_of(replace(loaded, adapter=tmp_path)) != merged
    # A processor without bf16 products sums attention otherwise.
    monkeypatch.setattr(type(loaded.model), "attention", "float32")
    assert identity_of(loaded) != own


# -- what does not fit --------------------------------------------------------------------------------------


class ShortWindow:
    """A model with a smaller context."""

    def __init__(self, loaded: LoadedModel, context_length: int) -> None:
        self._model = loaded.model
        self.context_length = context_length

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


def short(loaded: LoadedModel, context_length: int) -> LoadedModel:
    return replace(loaded, model=ShortWindow(loaded, context_length))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_context_that_is_too_long_is_refused_or_loses_its_middle(
    loaded: LoadedModel, retriever: ContextRetriever, documents: tuple[Document, ...]
) -> None:
    window = specrag.LanguageModel(short(loaded, 350))
    with pytest.raises(ContextLengthError, match=r"leaves room for 318 behind 32 new ones.*truncate_middle"):
        answer_of(make(window, "cost-aware", retriever), QUESTION, documents, max_tokens=32)
    assert (
        answer_of(make(window, "part", retriever), QUESTION, documents, max_tokens=4).reading.prompt_tokens
        < 318
    )
    cut = make(window, "cost-aware", retriever, truncate_middle=True)
    answer = answer_of(cut, QUESTION, documents, max_tokens=32, stop=".")
    assert 200 < answer.reading.prompt_tokens <= 318
    part = answer.reading.part
    assert part is not None
    whole = retriever.documents(documents, loaded.files.folder / "tokenizer.json")
    assert answer.reading.left_out_tokens + part.context_tokens == whole.tokens
    plan = cut._planner.plan(LongQuestion(plain_question(), documents, (), 32, raw=False))
    prompt = loaded.tokenizer.decode(plan.tokens)
    assert GAP in prompt
    assert documents[0].parts[0].text[:40] in prompt
    assert whole.chunks[-1].text in prompt
    assert documents[1].parts[0].text[:40] not in prompt
    with pytest.raises(ContextLengthError, match="not one chunk"):
        answer_of(cut, "Who? " * 200, documents, max_tokens=32)


def test_both_ends_are_about_as_long() -> None:
    assert both_ends([10] * 10, 65) == (3, 3)
    assert both_ends([50, 10, 10, 10, 10], 100) == (1, 4)
    assert both_ends([10, 10], 5) == (0, 0)
    assert sum(both_ends([10, 10, 10], 1000)) == 3


def test_a_drafter_with_a_shorter_window_reads_a_smaller_part(
    loaded: LoadedModel, documents: tuple[Document, ...]
) -> None:
    wide = ContextRetriever(ContextSettings(chunk_tokens=64, min_tokens=400, threshold=-1))
    drafter = specrag.LanguageModel(short(loaded, 250))
    planner = ReadingPlanner(
        loaded, context_method(RapidDecoder(drafter)), wide, truncate_middle=False, free=lambda: None
    )
    plan = planner.plan(LongQuestion(plain_question(), documents, (), 32, raw=False))
    assert 130 < plan.reading.drafter_tokens <= 218
    assert plan.reading.memory.keys_values > 0


def test_a_drafter_of_another_vocabulary_reads_its_own_tokens(
    loaded: LoadedModel, retriever: ContextRetriever, documents: tuple[Document, ...]
) -> None:
    theirs = Tokenizer(resolve("gemma-3-270m"))  # of a real other vocabulary; no pass is run
    drafter = specrag.LanguageModel(replace(loaded, tokenizer=theirs))
    method = RapidDecoder(drafter)
    planner = ReadingPlanner(
        loaded, context_method(method), retriever, truncate_middle=False, free=lambda: None
    )
    plan = planner.plan(LongQuestion(plain_question(), documents, (), 32, raw=False))
    assert isinstance(plan.method, Reading)
    said = theirs.decode(plan.method.tokens)
    assert QUESTION in said
    assert all(scored.chunk.text in said for scored in plan.reading.chunks)
    ids = [token % loaded.model.vocab_size for token in plan.method.tokens]
    assert QUESTION not in loaded.tokenizer.decode(ids)


def test_a_context_that_is_all_relevant_is_decoded_by_copies_alone_and_says_so(
    target: specrag.LanguageModel, documents: tuple[Document, ...]
) -> None:
    everything = ContextRetriever(ContextSettings(threshold=-1))
    answer = answer_of(make(target, "cost-aware", everything), QUESTION, documents[-2:], max_tokens=4)
    assert answer.reading.fallback == NOTHING_LEFT_OUT
    assert answer.reading.method == "adaptive"
    assert answer.generation.usage.drafted_by
    assert answer.stats.drafter_tokens == 0
    assert (
        answer.text
        == answer_of(make(target, "plain", everything), QUESTION, documents[-2:], max_tokens=4).text
    )


def test_a_drafter_that_is_not_asked_reads_nothing(
    target: specrag.LanguageModel, retriever: ContextRetriever, documents: tuple[Document, ...]
) -> None:
    answer = answer_of(make(target, "cost-aware", retriever), QUESTION, documents, max_tokens=1)
    assert answer.reading.drafter_tokens > 0
    assert (answer.stats.drafter_tokens, answer.stats.drafter_prefill_seconds) == (0, 0)


def test_tenants_share_no_cut_or_encoded_context(
    target: specrag.LanguageModel, documents: tuple[Document, ...]
) -> None:
    retriever = ContextRetriever(SMALL)
    long = make(target, "part", retriever)
    for tenant in ("one", "two", "one"):
        next(events_of(long, QUESTION, documents, tenant=tenant))
    assert len(retriever._contexts) == 2
    assert {context.tenant for context in retriever._contexts.values()} == {"one", "two"}


def test_a_question_about_something_else_still_reads_the_best_chunk(
    target: specrag.LanguageModel, retriever: ContextRetriever, documents: tuple[Document, ...]
) -> None:
    reading = next(events_of(make(target, "cost-aware", retriever), "How do I reset my router?", documents))
    assert isinstance(reading, ContextReading)
    assert reading.part is not None
    assert reading.part.below_threshold
    assert len(reading.chunks) == 1


def test_memory_is_refused_before_anything_is_read(
    target: specrag.LanguageModel,
    retriever: ContextRetriever,
    documents: tuple[Document, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specrag.engine.memory.free_bytes", lambda *_: 10**7)
    long = make(target, "cost-aware", retriever)
    with pytest.raises(InputError, match=r"for keys and values.*0\.01 GB are free"):
        next(events_of(long, QUESTION, documents))
    assert long._prefixes is not None
    assert long._prefixes.nbytes == 0


# -- conversations ------------------------------------------------------------------------------------------


def test_a_conversation_is_a_long_context_too(
    target: specrag.LanguageModel, retriever: ContextRetriever, documents: tuple[Document, ...]
) -> None:
    history = [
        message
        for document in documents[-2:]
        for message in (
            {"role": "user", "content": f"Tell me about {document.title}."},
            {"role": "assistant", "content": document.parts[0].text},
        )
    ]
    expected = answer_of(make(target, "plain", retriever), QUESTION, history=history, max_tokens=6)
    answer = answer_of(make(target, "cost-aware", retriever), QUESTION, history=history, max_tokens=6)
    assert answer.text == expected.text
    assert answer.stats.prompt_tokens == len(target.encode([*history, {"role": "user", "content": QUESTION}]))
    assert any("Curie" in scored.chunk.text for scored in answer.reading.chunks)
    assert {scored.chunk.source for scored in answer.reading.chunks} == {"conversation"}
    assert 0 < answer.reading.drafter_tokens < answer.stats.prompt_tokens


def test_a_drafters_conversation_has_its_speakers_in_turns(
    loaded: LoadedModel, retriever: ContextRetriever
) -> None:
    long = "word " * 300
    history = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": long}]
    context = retriever.messages(history, loaded.files.folder / "tokenizer.json")
    assert len(context.chunks) > 2
    turns = plain_question().after_part(context.chunks[1:])
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
    assert (turns[0]["content"], turns[-1]["content"]) == (GAP, QUESTION)


# -- bad input ----------------------------------------------------------------------------------------------


def test_values_that_cannot_be_used(
    target: specrag.LanguageModel,
    retriever: ContextRetriever,
    documents: tuple[Document, ...],
    tmp_path: Path,
) -> None:
    long = make(target, "plain", retriever)
    with pytest.raises(InputError, match="question"):
        answer_of(long, "  ", documents)
    with pytest.raises(InputError, match="it is empty; give documents"):
        answer_of(long, QUESTION)
    with pytest.raises(InputError, match="they hold no text"):
        answer_of(long, QUESTION, ["", " \n"])
    with pytest.raises(InputError, match="no such file"):
        answer_of(long, QUESTION, tmp_path / "missing.pdf")
    with pytest.raises(InputError, match="LongContext itself is given one"):
        answer_of(long, QUESTION, documents, method="plain")
    with pytest.raises(InputError, match="history"):
        answer_of(long, QUESTION, documents, history=[{"role": "tool", "content": "x"}])
    with pytest.raises(InputError, match=r"did you mean rapid\?"):
        target.generate(QUESTION, documents=documents, method="rapdi")
