"""Shards are one store: the same bits, and a clear error or a marked part when one of them is down."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.errors import InputError, StoreUnavailable
from specrag.retrieval.index.base import Query, Ranking
from specrag.retrieval.index.flat import FlatIndex
from specrag.retrieval.index.scoring import Floats, Longs
from specrag.retrieval.knowledge_base import KnowledgeBase, SingleIndex
from specrag.retrieval.manifest import EncoderRecord, KnowledgeBaseError
from specrag.retrieval.passage import Passage
from specrag.retrieval.stores.base import Collection, Limits, Loading
from specrag.retrieval.stores.questions import QuestionSearch
from specrag.retrieval.stores.registry import load, open_store, shard_addresses, shown, store_type
from specrag.retrieval.stores.sharded import MergedBases, ShardedRetriever
from tests.methods.ralm_toys import (
    Case,
    ToyRetriever,
    WholeContextModel,
    outcome,
    ralmspec,
    sequential,
    toy_llm,
)
from tests.methods.run import answer_of
from tests.retrieval.library import QUESTIONS, encoder, index
from tests.retrieval.stores.qdrant_server import QdrantServer
from tests.retrieval.stores.tables import collection, passage, questions, random_vectors, same

VECTORS = random_vectors(400, 12)
VECTORS[100:200] = VECTORS[:100]  # ties between the shards
FLAT = FlatIndex.build(VECTORS)
QUICK = Limits(timeout=20, connect_timeout=5, retries=0)


@pytest.fixture(scope="module")
def servers() -> Iterator[list[QdrantServer]]:
    with QdrantServer() as first, QdrantServer() as second, QdrantServer() as third:
        yield [first, second, third]


@pytest.fixture(scope="module")
def address(servers: list[QdrantServer]) -> str:
    """A third of the passages in each, by their ids."""
    made = collection(VECTORS)
    for number, server in enumerate(servers):
        one = server.address("part")
        store_type(one).load(one, made.part(number, len(servers)), Loading())
    return ",".join(server.address("part") for server in servers)


@pytest.fixture
def sharded(address: str) -> Iterator[ShardedRetriever]:
    with open_store(f"shards:{address}") as store:
        assert isinstance(store, ShardedRetriever)
        yield store


@pytest.mark.parametrize("k", [1, 3, 40, 400, 1000])
def test_the_bits_of_one_index(k: int, sharded: ShardedRetriever) -> None:
    asked = np.concatenate([random_vectors(6, 12, seed=k), VECTORS[[7, 150]], np.zeros((1, 12), np.float32)])
    queries = questions(asked)
    expected = FLAT.search(queries, k)
    assert len(sharded) == 400
    assert same(sharded.search(queries, k), expected)
    assert same([sharded.search([query], k)[0] for query in queries], expected)
    ids = expected[0].ids[:5]
    assert sharded.score(queries, ids).tobytes() == FLAT.score(queries, ids).tobytes()
    assert sharded.passages(ids.tolist()) == [passage(id) for id in ids.tolist()]


def test_passages_that_no_search_has_returned(sharded: ShardedRetriever) -> None:
    ids = np.array([399, 0, 17, 0])
    queries = questions(VECTORS[:2])
    assert sharded.score(queries, ids).tobytes() == FLAT.score(queries, ids).tobytes()
    assert sharded.passages(ids.tolist()) == [passage(id) for id in ids.tolist()]
    with pytest.raises(InputError, match=r"passage id: 400 .* no shard has such a passage"):
        sharded.passages([400])
    assert sharded.search([], 3) == []


def test_conditions_leave_shards_out(sharded: ShardedRetriever) -> None:
    queries = questions(random_vectors(3, 12, seed=5))
    allowed = np.zeros(400, dtype=bool)
    allowed[[3, 6, 9]] = True  # all in the first shard
    assert same(sharded.narrowed("number = 3, 6, 9").search(queries, 7), FLAT.search(queries, 7, allowed))
    with pytest.raises(InputError, match="no passage satisfies it"):
        sharded.narrowed("number > 1000")
    with pytest.raises(InputError, match=r"where: 'nummer' .* did you mean 'number'"):
        sharded.narrowed("nummer > 1000")


def test_a_passage_of_two_shards_is_found_once(servers: list[QdrantServer]) -> None:
    made = collection(VECTORS)
    for server, ids in zip(servers[:2], (range(300), range(200, 400)), strict=True):
        one = server.address("overlapping")
        store_type(one).load(one, replace(made, ids=np.array(ids, dtype=np.int64)), Loading())
    both = ",".join(server.address("overlapping") for server in servers[:2])
    with open_store(f"shards:{both}") as store:
        queries = questions(random_vectors(4, 12, seed=6))
        assert same(store.search(queries, 250), FLAT.search(queries, 250))


def test_all_shards_are_asked_at_once(servers: list[QdrantServer], sharded: ShardedRetriever) -> None:
    together = threading.Barrier(3, timeout=20)

    def wait(path: str) -> None:
        if path.endswith("batch"):
            together.wait()

    for server in servers:
        server.before = wait
    try:
        assert same(sharded.search(questions(VECTORS[:2]), 3), FLAT.search(questions(VECTORS[:2]), 3))
    finally:
        for server in servers:
            server.before = lambda _: None


def test_a_shard_that_is_down_is_an_error_or_a_marked_part(servers: list[QdrantServer], address: str) -> None:
    queries = questions(random_vectors(4, 12, seed=8))
    without = np.arange(400) % 3 != 1
    with (
        open_store(f"shards:{address}", limits=QUICK) as strict,
        QuestionSearch(open_store(f"partial-shards:{address}", limits=QUICK)) as partial,
    ):
        began = time.monotonic()
        assert same(partial.store.search(queries, 5), FLAT.search(queries, 5))
        assert partial.missing_since(began) == ()
        servers[1].stop()
        try:
            with pytest.raises(
                StoreUnavailable,
                match=rf"^shard 2 of 3: qdrant: collection 'part' at 127\.0\.0\.1:{servers[1].port}",
            ):
                strict.search(queries, 5)
            began = time.monotonic()
            assert same(partial.store.search(queries, 5), FLAT.search(queries, 5, without))
            assert partial.missing_since(began) == (f"qdrant://127.0.0.1:{servers[1].port}/part",)
            with pytest.raises(StoreUnavailable, match="cannot be reached"):
                open_store(f"shards:{address}", limits=QUICK)
            with open_store(f"partial-shards:{address}", limits=QUICK) as late:
                assert isinstance(late, ShardedRetriever)
                assert same(late.search(queries, 5), FLAT.search(queries, 5, without))
                assert late.missing_since(time.monotonic()) == (f"qdrant://127.0.0.1:{servers[1].port}/part",)
            servers[0].stop()
            servers[2].stop()
            with pytest.raises(StoreUnavailable, match=r"shard \d of 3"):
                partial.store.search(queries, 5)
        finally:
            for server in servers:
                server.stop()
                server.start()
        began = time.monotonic()
        assert same(partial.store.search(queries, 5), FLAT.search(queries, 5))
        assert partial.missing_since(began) == ()


def test_shards_of_two_encoders_are_refused(servers: list[QdrantServer], address: str) -> None:
    other = replace(collection(VECTORS), encoder=EncoderRecord("other", "fp32", "fedcba9876543210", 12))
    one = servers[0].address("other")
    store_type(one).load(one, other, Loading())
    with pytest.raises(KnowledgeBaseError, match=r"shards: .*/other was made with 'other' .* with 'made-up'"):
        open_store(f"shards:{address},{one}")


def test_addresses_of_shards() -> None:
    assert shard_addresses("shards: a , qdrant://h/b,") == ("a", "qdrant://h/b")
    assert shard_addresses("a,b") == ("a,b",)
    secret = "partial-shards:qdrant://:pa55@h/b,postgresql://me:pa55@h/base#t,folder"
    assert shown(secret) == "partial-shards:qdrant://h/b,postgresql://h/base#t,folder"
    with pytest.raises(InputError, match="give shards:ADDRESS,ADDRESS"):
        open_store("shards: ,")
    with pytest.raises(InputError, match="words are searched in folders alone"):
        open_store("shards:qdrant://h/b", index="bm25")


# -- knowledge bases of this machine ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bases(model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Two knowledge bases, and one with the documents of both in the same order."""
    folder = tmp_path_factory.mktemp("shards")
    texts = {
        "a-copper.md": "# Copper\n\nCopper is a red metal. Wires are made of copper.\n",
        "a-gold.txt": "Gold does not rust. Gold is heavy.\n",
        "b-heron.txt": "Herons nest in trees near the water, and they eat fish.\n",
        "b-iron.txt": "Iron rusts. Copper does not rust as iron does.\n",
        "b-tin.txt": "Tin is a soft metal.\n",
    }
    for name, text in texts.items():
        for place in (name[0], "whole"):
            (folder / place).mkdir(exist_ok=True)
            (folder / place / name).write_text(text)
    made = []
    for place in ("a", "b", "whole"):
        index(folder / place, kb=folder / f"kb-{place}")
        made.append(folder / f"kb-{place}")
    return made[0], made[1], made[2]


def _told(retriever: Any, k: int, where: Any = None) -> list[list[tuple[str, str, float]]]:
    queries = retriever.encode(QUESTIONS)
    return [
        [
            (one.source, one.text, score)
            for one, score in zip(
                retriever.passages(ranking.ids.tolist()), ranking.scores.tolist(), strict=True
            )
        ]
        for ranking in retriever.search(queries, k)
    ]


@pytest.mark.parametrize("name", ["flat", "bm25", "hybrid"])
@pytest.mark.parametrize("where", [None, "not source = b-tin.txt"])
def test_knowledge_bases_as_one(name: str, where: str | None, bases: tuple[Path, Path, Path]) -> None:
    first, second, whole = bases
    with KnowledgeBase.open(whole, encoder=encoder()) as base:
        expected = _told(SingleIndex(base, name, where), 4)
    with open_store(f"shards:{first},{second}", index=name, where=where, encoder=encoder()) as store:
        assert isinstance(store, ShardedRetriever if name == "flat" else MergedBases)
        assert _told(store, 4) == expected
        (ranking,) = store.search(store.encode(["copper"]), 3)
        scores = store.score(store.encode(["copper"]), ranking.ids)[0]
        assert scores.tobytes() == ranking.scores.tobytes()
        assert [one.id for one in store.passages(ranking.ids.tolist())] == ranking.ids.tolist()


def test_statistics_of_words_are_told_over_all(bases: tuple[Path, Path, Path]) -> None:
    """Without that, the scores would be others: copper is rarer among the second's passages than among all."""
    first, second, _ = bases
    with open_store(f"shards:{first},{second}", index="bm25") as store, KnowledgeBase.open(second) as alone:
        own = {one.text: score for one, score in _pairs(SingleIndex(alone, "bm25"), "copper")}
        together = {one.text: score for one, score in _pairs(store, "copper")}
    assert set(own) < set(together)
    assert all(score != together[text] for text, score in own.items())


def _pairs(retriever: Any, text: str) -> list[tuple[Passage, float]]:
    (ranking,) = retriever.search(retriever.encode([text]), 5)
    return list(zip(retriever.passages(ranking.ids.tolist()), ranking.scores.tolist(), strict=True))


def test_a_knowledge_base_is_spread_over_stores(
    servers: list[QdrantServer], bases: tuple[Path, Path, Path]
) -> None:
    both = "shards:" + ",".join(server.address("spread") for server in servers[:2])
    with KnowledgeBase.open(bases[2], encoder=encoder()) as base:
        assert load(both, base) == len(base)
        expected = [
            [(hit.passage, hit.score) for hit in hits] for hits in base.search(QUESTIONS, 3, index="flat")
        ]
        with QuestionSearch(open_store(both, encoder=encoder())) as found:
            told = [[(hit.passage, hit.score) for hit in hits] for hits in found.search(QUESTIONS, 3)]
            assert told == expected
            narrowed = found.search(QUESTIONS, 3, where="source = b-tin.txt")
            assert [{hit.passage.source for hit in hits} for hits in narrowed] == [{"b-tin.txt"}] * len(
                QUESTIONS
            )
        with pytest.raises(InputError, match="it exists already; replace it"):
            load(both, base)


# -- speculation ----------------------------------------------------------------------------------------------------


class StoredToy(ToyRetriever):
    """The toy's passages in stores; its own index says what is right."""

    stored: Any = None

    def search(self, queries: Sequence[Query], k: int, allowed: Any = None) -> list[Ranking]:
        found: list[Ranking] = self.stored.search(queries, k)
        return found

    def score(self, queries: Sequence[Query], passage_ids: Longs) -> Floats:
        scores: Floats = self.stored.score(queries, passage_ids)
        return scores

    def passages(self, ids: Sequence[int]) -> list[Passage]:
        found: list[Passage] = self.stored.passages(ids)
        return found


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    parts=st.integers(1, 3),
    stride=st.one_of(st.integers(1, 5), st.sampled_from(["os3", "cost-aware"])),
    prefetch=st.integers(1, 6),
    asynchronous=st.booleans(),
)
def test_speculation_over_stores_and_shards_is_sequential_retrieval(
    seed: int, parts: int, stride: Any, prefetch: int, asynchronous: bool, servers: list[QdrantServer]
) -> None:
    toy = StoredToy(seed, 14)
    assert isinstance(toy.index, FlatIndex)
    vectors = toy.index.vectors
    texts = [Passage(id, f"{id}.txt", "", "", text, {}) for id, text in enumerate(toy.texts)]
    made = Collection(
        np.arange(14),
        lambda ids: vectors[ids],
        lambda ids: [texts[id] for id in ids],
        collection(vectors).encoder,
    )
    addresses = [server.address("toy") for server in servers[:parts]]
    for number, one in enumerate(addresses):
        store_type(one).load(one, made.part(number, parts), Loading(replace=True))
    case = Case("ab", interval=2, query_tokens=6, passage_tokens=20, prompt_tokens=60, max_tokens=18)
    llm = toy_llm(WholeContextModel(seed, -9.0))
    try:
        local = ToyRetriever(seed, 14)
        wanted = outcome(answer_of(sequential(llm, local, **case.limits), case.question, **case.options))
        address = addresses[0] if parts == 1 else f"shards:{','.join(addresses)}"
        with open_store(address) as toy.stored:
            chosen = {"stride": stride, "prefetch": prefetch, "asynchronous": asynchronous}
            for method in (sequential(llm, toy, **case.limits), ralmspec(llm, toy, **case.limits, **chosen)):
                assert outcome(answer_of(method, case.question, **case.options)) == wanted
    finally:
        llm.close()
