"""Context retrieval: what is cut, what is taken, in what order, and that no text is encoded twice."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.errors import InputError
from specrag.methods.rapid.context.retriever import ContextRetriever, ContextSettings, choose
from specrag.methods.rapid.context.scores import VECTORS_FILE, ChunkScores, ContextIndex, TextVectors
from specrag.retrieval.documents.chunking import Chunker
from specrag.retrieval.documents.contexts import (
    ContextChunk,
    cut_documents,
    cut_messages,
    documents_of,
    read_context,
)
from specrag.retrieval.documents.converters import Part
from specrag.retrieval.documents.reader import Document
from specrag.retrieval.encoder.encoder import Encoder, load_encoder
from tests.retrieval.sample_files import pdf

FILLER = "The committee met on a Tuesday and spoke at length about the minutes of its last meeting. "
FACT = "The lighthouse keeper painted his door with vermilion pigment from Almadén."
QUESTION = "What pigment is on the lighthouse keeper's door?"


@pytest.fixture(scope="module")
def tokenizer_file(smollm2: Path) -> Path:
    return smollm2 / "tokenizer.json"


@pytest.fixture(scope="module")
def encoder(model_home: Path) -> Encoder:
    return load_encoder(device="cpu")


class Counting:
    """An encoder that counts the texts it is given."""

    def __init__(self, encoder: Encoder, fingerprint: str = "") -> None:
        self.encoder = encoder
        self.fingerprint = fingerprint or encoder.fingerprint
        self.dimension = encoder.dimension
        self.texts: list[str] = []

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        self.texts += texts
        return self.encoder.encode_passages(texts)


@pytest.fixture
def counting(encoder: Encoder) -> Counting:
    return Counting(encoder)


def document(text: str, title: str = "") -> Document:
    return Document("report.txt", title, (Part(text),))


# -- the budget ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "tokens", "budget"),
    [
        (ContextSettings(), 1_000, 4096),  # shorter than the budget
        (ContextSettings(), 24 * 4096, 4096),
        (ContextSettings(), 131_072, 5461),  # the paper's 128K: a 24th
        (ContextSettings(max_tokens=5000), 131_072, 5000),
        (ContextSettings(min_tokens=300), 4_800, 300),
        (ContextSettings(min_tokens=100), 4_800, 200),
    ],
)
def test_budget(given: ContextSettings, tokens: int, budget: int) -> None:
    assert given.budget(tokens) == budget


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"chunk_tokens": 8}, "chunk_tokens"),
        ({"min_tokens": 0}, "min_tokens"),
        ({"min_tokens": True}, "min_tokens"),
        ({"max_tokens": 100}, "max_tokens"),  # below min_tokens
        ({"share": 0}, "share"),
        ({"threshold": 1.5}, "threshold"),
        ({"scoring": "cosine"}, "scoring"),
        ({"pooling": "sum"}, "pooling"),
    ],
)
def test_settings_out_of_range(values: dict[str, object], field: str) -> None:
    with pytest.raises(InputError, match=field):
        ContextSettings(**values)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 8).map(lambda n: n / 8), st.integers(1, 600), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 1500),
)
def test_the_best_relevant_chunks_until_the_next_would_exceed_the_budget(
    chunks: list[tuple[float, int, bool]], budget: int
) -> None:
    scores = np.array([score for score, _, _ in chunks], dtype=np.float32)
    relevant = np.array([keep for _, _, keep in chunks])
    tokens = [count for _, count, _ in chunks]
    chosen = choose(ChunkScores(scores, relevant), tokens, budget)
    assert chosen == sorted(set(chosen))  # document order
    ranked = sorted(range(len(chunks)), key=lambda n: (-scores[n], n))
    candidates = [n for n in ranked if relevant[n]] or ranked[:1]
    assert set(chosen) == set(candidates[: len(chosen)])  # none was passed over for a worse one
    assert len(chosen) == 1 or sum(tokens[n] for n in chosen) <= budget
    if len(chosen) < len(candidates):
        assert sum(tokens[n] for n in chosen) + tokens[candidates[len(chosen)]] > budget


# -- cutting ------------------------------------------------------------------------------------------------


def test_documents_are_cut_at_borders_and_nothing_is_lost(tokenizer_file: Path) -> None:
    first = document("\n\n".join(f"Paragraph {n}. {FILLER * 4}" for n in range(30)), "First")
    second = Document("b.pdf", "Second", (Part("One page.", "page 1"), Part(FILLER * 3, "page 2")))
    cutter = Chunker(tokenizer_file, 512, 0)
    chunks = cut_documents([first, second], cutter)
    assert [chunk.document for chunk in chunks] == sorted(chunk.document for chunk in chunks)
    assert all(0 < chunk.tokens == cutter.count(chunk.text) <= 512 for chunk in chunks)
    assert min(chunk.tokens for chunk in chunks[:4]) > 350  # as long as paragraphs let them be
    assert all(chunk.text.startswith("Paragraph ") for chunk in chunks if chunk.document == 0)
    said = " ".join(chunk.text for chunk in chunks if chunk.document == 0)
    assert said.split() == first.parts[0].text.split()
    assert [(chunk.source, chunk.place) for chunk in chunks[-2:]] == [
        ("b.pdf", "page 1"),
        ("b.pdf", "page 2"),
    ]


def test_exchanges_of_a_conversation_stay_together(tokenizer_file: Path) -> None:
    messages = [
        {"role": role, "content": f"{role} {turn}. {FILLER * 2}"}
        for turn in range(6)
        for role in ("user", "assistant")
    ]
    messages.append({"role": "user", "content": FILLER * 20})  # longer than a chunk
    chunks = cut_messages(messages, Chunker(tokenizer_file, 128, 0))
    assert all(chunk.tokens <= 128 for chunk in chunks)
    assert [chunk.place for chunk in chunks[:2]] == ["messages 1-2", "messages 3-4"]
    assert [message["role"] for message in chunks[0].messages] == ["user", "assistant"]
    assert chunks[0].text.startswith("User: user 0. ")
    assert "\nAssistant: assistant 0. " in chunks[0].text
    assert {chunk.place for chunk in chunks[6:]} == {"message 13"}
    said = " ".join(message["content"] for chunk in chunks for message in chunk.messages)
    assert said.split() == " ".join(message["content"] for message in messages).split()


# -- ranking ------------------------------------------------------------------------------------------------


def test_what_stands_behind_the_encoders_limit_is_found(tokenizer_file: Path, encoder: Encoder) -> None:
    long = FILLER * 20 + FACT
    chunk = ContextChunk(long, "a", "", "", 400)
    other = ContextChunk(FILLER * 20, "a", "", "", 380)
    cut_off = float(encoder.encode_queries([QUESTION])[0] @ encoder.encode_passages([long])[0])
    best = ContextIndex([chunk, other], TextVectors(encoder)).score(QUESTION, "dense", 0.3).scores
    mean = ContextIndex([chunk, other], TextVectors(encoder), "mean").score(QUESTION, "dense", 0.3).scores
    assert best[0] > 0.3 > best[1]
    assert best[0] > mean[0] > mean[1] + 0.02
    assert cut_off < 0.1 + best[1]  # the encoder alone reads nothing of the fact


def test_a_chunk_that_the_encoder_reads_whole_has_its_plain_cosine(encoder: Encoder) -> None:
    chunks = [ContextChunk(text, "a", "Title", "", 9) for text in (FACT, FILLER)]
    found = ContextIndex(chunks, TextVectors(encoder)).score(QUESTION, "dense", 0.3)
    expected = encoder.encode_passages([FACT, FILLER]) @ encoder.encode_queries([QUESTION])[0]
    np.testing.assert_allclose(found.scores, expected, atol=1e-3)
    assert list(found.relevant) == [True, False]


def test_titles_count_where_there_are_several_documents(encoder: Encoder) -> None:
    text = "It was founded in 1897 and moved twice."
    chunks = [ContextChunk(text, "a", title, "", 12, number) for number, title in enumerate(("Bank", "Zoo"))]
    scores = (
        ContextIndex(chunks, TextVectors(encoder)).score("When was the zoo founded?", "dense", 0.3).scores
    )
    assert scores[1] > scores[0] + 0.05


def test_words_that_no_vector_knows_are_found_by_bm25_and_hybrid(
    tokenizer_file: Path, encoder: Encoder
) -> None:
    paragraphs = [f"{FILLER * 2} Item {n}." for n in range(12)]
    paragraphs[7] += " Valve XK-7741 is closed."
    text = "\n\n".join(paragraphs)
    for scoring in ("bm25", "hybrid"):
        chosen = ContextSettings(chunk_tokens=64, min_tokens=64, threshold=0.9, scoring=scoring)
        part = ContextRetriever(chosen, encoder=encoder).retrieve("XK-7741", [document(text)], tokenizer_file)
        assert not part.below_threshold
        assert len(part.chunks) == 1
        assert "XK-7741" in part.chunks[0].chunk.text
    alone = ContextRetriever(ContextSettings(scoring="bm25"), encoder="no-such-encoder")
    assert alone.retrieve("XK-7741", [document(text)], tokenizer_file).chunks  # bm25 loads no encoder


def test_document_order_and_flags(tokenizer_file: Path, encoder: Encoder) -> None:
    texts = [FILLER * 2, f"{FACT} {FILLER}", FILLER * 2, "The keeper of the lighthouse is old."]
    documents = [document("\n\n".join(texts))]
    small = ContextSettings(chunk_tokens=48, min_tokens=100, max_tokens=100)
    retriever = ContextRetriever(small, encoder=encoder)
    part = retriever.retrieve(QUESTION, documents, tokenizer_file)
    assert [scored.number for scored in part.chunks] == sorted(scored.number for scored in part.chunks)
    assert any("vermilion" in scored.chunk.text for scored in part.chunks)
    assert part.tokens <= 100 < part.context_tokens
    assert not part.whole
    assert not part.below_threshold
    nothing = retriever.retrieve("How do I reset my router?", documents, tokenizer_file)
    assert nothing.below_threshold
    assert len(nothing.chunks) == 1
    everything = ContextRetriever(ContextSettings(threshold=-1), encoder=encoder)
    assert everything.retrieve(QUESTION, documents, tokenizer_file).whole


# -- vectors ------------------------------------------------------------------------------------------------


def test_a_text_is_encoded_once(counting: Counting) -> None:
    vectors = TextVectors(counting)  # type: ignore[arg-type]
    first = vectors.encode(["one", "two", "one"])
    assert counting.texts == ["one", "two"]
    np.testing.assert_array_equal(first[0], first[2])
    np.testing.assert_array_equal(vectors.encode(["two", "three"])[0], first[1])
    assert counting.texts == ["one", "two", "three"]
    few = TextVectors(counting, most_kept=1)  # type: ignore[arg-type]
    few.encode(["one", "two"])
    few.encode(["two"])
    few.encode(["one"])
    assert counting.texts[3:] == ["one", "two", "one"]


def test_vectors_outlive_the_process_and_damage(tmp_path: Path, counting: Counting) -> None:
    expected = TextVectors(counting, tmp_path).encode(["one", "two"])  # type: ignore[arg-type]
    again = TextVectors(counting, tmp_path)  # type: ignore[arg-type]
    np.testing.assert_array_equal(again.encode(["one", "two"]), expected)
    assert len(counting.texts) == 2
    other = Counting(counting.encoder, "another encoder")
    TextVectors(other, tmp_path).encode(["one"])  # type: ignore[arg-type]
    assert other.texts == ["one"]
    file = tmp_path / VECTORS_FILE
    with sqlite3.connect(file) as database:
        database.execute("UPDATE vectors SET vector = zeroblob(length(vector))")
    database.close()
    np.testing.assert_array_equal(TextVectors(counting, tmp_path).encode(["two"])[0], expected[1])  # type: ignore[arg-type]
    assert counting.texts[2:] == ["two"]
    file.write_bytes(b"no database at all, " * 100)
    np.testing.assert_array_equal(TextVectors(counting, tmp_path).encode(["two"])[0], expected[1])  # type: ignore[arg-type]
    np.testing.assert_array_equal(TextVectors(counting, tmp_path).encode(["two"])[0], expected[1])  # type: ignore[arg-type]
    assert counting.texts[2:] == ["two", "two"]


def test_a_context_is_cut_and_encoded_once(
    tokenizer_file: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever = ContextRetriever(encoder=encoder)
    documents = [document(FILLER * 30)]
    first = retriever.documents(documents, tokenizer_file)
    retriever.select(QUESTION, first)
    monkeypatch.setattr(encoder, "encode_passages", lambda *_: pytest.fail("encoded again"))
    second = retriever.documents([document(FILLER * 30)], tokenizer_file)
    assert second is first
    retriever.select("And who met?", second)
    assert retriever.documents([document(FILLER * 30, "Title")], tokenizer_file) is not first


def test_what_one_tenant_sent_serves_no_other(
    tokenizer_file: Path, encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither chunks nor vectors, in memory or on disk: an answer that comes sooner would tell."""
    texts: list[str] = []

    def encode(some: Sequence[str]) -> np.ndarray:
        texts.extend(some)
        return Encoder.encode_passages(encoder, some)

    monkeypatch.setattr(encoder, "encode_passages", encode)
    for folder in (None, tmp_path):
        texts.clear()
        retriever = ContextRetriever(encoder=encoder, vectors=folder)
        for tenant in ("one", "two", ""):
            first = retriever.documents([document(FILLER * 30)], tokenizer_file, tenant)
            before = len(texts)
            retriever.select(QUESTION, first)
            assert len(texts) > before
            # The tenant's own text is known, also as a part of another one.
            assert retriever.documents([document(FILLER * 30)], tokenizer_file, tenant) is first
            retriever.select(QUESTION, first.only([0]))
            assert len(texts) == before + len(set(texts))
        said = [{"role": "user", "content": FILLER * 3}]
        assert retriever.messages(said, tokenizer_file, "one") is not retriever.messages(
            said, tokenizer_file, "two"
        )


# -- files --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pictures.pdf").write_bytes(pdf("", drawing=True))
    (tmp_path / "half.pdf").write_bytes(pdf("A page with words.", "", drawing=True))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "b.md").write_text("# Second\n\nwords")
    (tmp_path / "a.txt").write_text("first")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pictures.pdf", "PDF without text"),
        ("empty.txt", "holds no text"),
        ("missing.txt", "no such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_its_reason(folder: Path, name: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        read_context([folder / "a.txt", folder / name])
    assert name in str(caught.value)


def test_files_come_in_the_order_given(folder: Path) -> None:
    found = read_context([folder / "b.md", folder / "a.txt", folder / "half.pdf"])
    assert [document.source for document in found.documents] == ["b.md", "a.txt", "half.pdf"]
    assert [entry.source for entry in found.skipped] == ["half.pdf"]
    assert len(read_context([folder / "b.md", folder / "b.md", folder / "b.md"]).documents) == 1
    whole = read_context([folder])
    assert [document.source for document in whole.documents] == ["a.txt", "b.md", "half.pdf"]
    assert {entry.source for entry in whole.skipped} == {"empty.txt", "half.pdf", "pictures.pdf"}


def test_documents_of_texts_and_paths(folder: Path) -> None:
    assert [d.source for d in documents_of("some text")] == ["text 1"]
    assert [d.source for d in documents_of([folder / "a.txt", "text", document("x")])] == [
        "a.txt",
        "text 2",
        "report.txt",
    ]
    assert documents_of(()) == ()
    with pytest.raises(InputError, match="no text"):
        documents_of(["  ", "\n"])
    with pytest.raises(InputError, match="texts, paths or documents"):
        documents_of([3])  # type: ignore[list-item]


def test_a_context_without_text_is_refused(tokenizer_file: Path) -> None:
    with pytest.raises(InputError, match="holds no text"):
        ContextRetriever(ContextSettings(scoring="bm25")).documents([document(" \n ")], tokenizer_file)
