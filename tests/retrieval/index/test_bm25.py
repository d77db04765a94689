"""Sparse search: the weights of the formula, terms of a query, many blocks, the same files each time."""

from __future__ import annotations

import math
from collections import Counter

import bm25s
import numpy as np
import pytest

from specrag.errors import InputError
from specrag.retrieval.index import bm25 as bm25_module
from specrag.retrieval.index.base import Query
from specrag.retrieval.index.bm25 import BM25Index, BM25Settings, count_terms
from specrag.retrieval.index.scoring import SPARSE_BLOCK

TEXTS = [
    "The river Danube flows through Vienna and Budapest.",
    "Budapest was formed in 1873 from Buda, Obuda and Pest; Budapest lies on the river.",
    "Mount Everest is the highest mountain above the sea.",
    "",
    "Rivers carry water. Running rivers, river runs.",
]
PLAIN = BM25Settings(languages=())


def _query(index: BM25Index, text: str) -> Query:
    return Query(text, terms=index.terms(text))


def test_scores_follow_the_formula() -> None:
    settings = BM25Settings(k1=1.2, b=0.6, languages=())
    index = BM25Index.build(TEXTS, settings)
    documents = settings.split(TEXTS)
    average = sum(map(len, documents)) / len(documents)
    question = "river budapest river unknown"
    scores = index.score([_query(index, question)], np.arange(len(TEXTS)))[0]
    for document, score in zip(documents, scores, strict=True):
        expected = 0.0
        for term, times in Counter(question.split()).items():
            frequency = document.count(term)
            holding = sum(term in other for other in documents)
            idf = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
            saturation = frequency + 1.2 * (1 - 0.6 + 0.6 * len(document) / average)
            expected += times * idf * frequency / saturation
        assert score == pytest.approx(expected, rel=1e-6)


def test_scores_agree_with_bm25s() -> None:
    index = BM25Index.build(TEXTS)
    model = bm25s.BM25()
    split = BM25Settings().split([*TEXTS, "running rivers of Budapest"])
    model.index(split[:-1], show_progress=False)
    scores = index.score([_query(index, "running rivers of Budapest")], np.arange(len(TEXTS)))[0]
    np.testing.assert_allclose(scores, model.get_scores(split[-1]), rtol=1e-6)
    assert scores[0] > 0  # the stem of "rivers" is in "river"


def test_terms_are_ascending_known_and_repeated() -> None:
    index = BM25Index.build(TEXTS, PLAIN)
    terms = index.terms("water river xylophone RIVER")
    assert terms.dtype == np.int32
    assert (np.diff(terms) >= 0).all()  # in memory the ids have the order of the texts
    assert len(terms) == 3
    assert len(set(terms.tolist())) == 2


def test_stop_words_and_stems_are_settings() -> None:
    assert BM25Settings().split(["The running rivers"]) == [["run", "river"]]
    assert PLAIN.split(["The running rivers"]) == [["the", "running", "rivers"]]
    german = BM25Settings(languages=("german",))
    assert german.split(["Die Flüsse"]) == [["fluss"]]


MIXED = [
    "The warranty of the lenses is two years.",
    "Die Garantie auf das Glas der Objektive gilt zwei Jahre.",
    "镜头的保修期为两年。",
    "Office hours are from nine to five.",
]


@pytest.mark.parametrize(
    ("question", "best"),
    [
        ("warranties of a lens", 0),
        ("Gläser?", 1),  # too short to tell its language
        ("Wie lange gilt das Objektiv?", 1),
        ("保修期多长？", 2),
        ("offices", 3),
    ],
)
def test_each_text_is_read_in_its_own_language(question: str, best: int) -> None:
    index = BM25Index.build(MIXED)
    assert set(index.settings.languages) == {"english", "german", "chinese"}
    assert index.search([_query(index, question)], 1)[0].ids.tolist() == [best]


def test_one_language_is_as_ever() -> None:
    assert BM25Index.build(TEXTS).settings == BM25Settings()


@pytest.mark.parametrize("text", ["", "   ", "the of and", "xylophone", "?!"])
def test_a_query_without_a_known_term_finds_nothing(text: str) -> None:
    index = BM25Index.build(TEXTS)
    ranking = index.search([_query(index, text)], 3)[0]
    assert ranking.ids.dtype == np.int64
    assert ranking.scores.dtype == np.float32
    assert len(ranking) == 0


def test_only_passages_with_a_term_are_returned() -> None:
    index = BM25Index.build(TEXTS)
    assert sorted(index.search([_query(index, "river")], 5)[0].ids.tolist()) == [0, 1, 4]
    allowed = np.array([True, False, True, True, False])
    assert index.search([_query(index, "river")], 5, allowed)[0].ids.tolist() == [0]


@pytest.mark.parametrize("texts", [[], ["", ""], ["the and", "of"]])
def test_passages_without_terms_can_be_indexed(texts: list[str]) -> None:
    index = BM25Index.build(texts)
    assert len(index) == len(texts)
    assert len(index.search([_query(index, "river")], 2)[0]) == 0


def test_a_corpus_of_many_blocks_is_ranked_as_a_whole() -> None:
    rng = np.random.default_rng(0)
    count = 2 * SPARSE_BLOCK + 77
    words = np.array(["aa", "bb", "cc", "dd", "ee", "zz"])
    texts = [" ".join(words[rng.integers(0, 6, rng.integers(1, 9))]) for _ in range(count)]
    index = BM25Index.build(texts, PLAIN)
    query = _query(index, "aa cc cc ee")
    ranking = index.search([query], 500)[0]
    own = index.score([query], np.arange(count))[0]
    assert ranking.ids.tolist() == np.lexsort((np.arange(count), -own))[:500].tolist()
    documents = [text.split() for text in texts[:50]]
    average = sum(len(text.split()) for text in texts) / count
    rarity = {
        word: math.log(1 + (count - held + 0.5) / (held + 0.5))
        for word in ("aa", "cc", "ee")
        for held in [sum(word in text.split() for text in texts)]
    }
    expected = [
        sum(
            rarity[word]
            * document.count(word)
            / (document.count(word) + 1.5 * (0.25 + 0.75 * len(document) / average))
            for word in ("aa", "cc", "cc", "ee")
        )
        for document in documents
    ]
    np.testing.assert_allclose(own[:50], expected, rtol=1e-6)


def test_counts_do_not_depend_on_the_order_of_terms() -> None:
    counts = count_terms([["tin", "ash", "tin"], [], ["ash", "zinc"]])
    assert counts.terms == ["ash", "tin", "zinc"]
    assert counts.starts.tolist() == [0, 2, 3, 4]
    assert counts.rows.tolist() == [0, 2, 0, 2]
    assert counts.times.tolist() == [1, 1, 2, 1]
    assert counts.lengths.tolist() == [3, 0, 2]


def test_weights_that_leave_the_cache_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = BM25Index.build(TEXTS)
    queries = [_query(whole, text) for text in ("river budapest", "mount river", "water")]
    expected = [whole.score([query], np.arange(5)).tolist() for query in queries]
    monkeypatch.setattr(bm25_module, "_CACHED_BYTES", 20)
    index = BM25Index.build(TEXTS)
    for _ in range(2):
        assert [index.score([query], np.arange(5)).tolist() for query in queries] == expected
    assert index._cached_bytes <= 20


@pytest.mark.parametrize(
    ("field", "value"),
    [("k1", -1.0), ("k1", math.nan), ("b", 1.5), ("languages", ("klingon",))],
)
def test_unusable_settings_are_named(field: str, value: object) -> None:
    with pytest.raises(InputError, match=f"^{field}: "):
        BM25Settings(**{field: value})  # type: ignore[arg-type]
