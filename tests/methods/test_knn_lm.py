"""kNN-LM on toy models: equal to a plain oracle, and with speculation equal to itself without, whatever is chosen."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specrag.engine.sampling_params import SamplingParams
from specrag.engine.stopping import StopConditions
from specrag.errors import InputError
from specrag.methods.knn_lm import KnnLM
from specrag.methods.knn_lm.decoder import KnnDecoder, KnnRecord, speculative
from specrag.methods.knn_lm.mixture import Mixture, mix, neighbour_tokens, normaliser
from specrag.methods.knn_lm.request import SOURCE
from specrag.methods.knn_lm.store.cache import FollowerCache
from specrag.methods.knn_lm.store.datastore import Datastore
from specrag.methods.knn_lm.store.index import Neighbours
from specrag.methods.token_decoders import PlainDecoder
from specrag.models.toy import ToyModel
from specrag.speculation.decode import TARGET
from tests.methods.knn_store.knn_toys import VOCABULARY, nearest, toy
from tests.methods.knn_toys import PROMPT, decode, knn, make_datastore, oracle

MIXTURE = Mixture(k=8, weight=0.5, temperature=5.0)

SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0, seed=5),
    "truncated": SamplingParams(temperature=0.7, top_k=12, top_p=0.9, min_p=0.01, seed=2**70),
    "penalised": SamplingParams(
        temperature=0.9,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        logit_bias={3: 2.0, 4: float("-inf")},
        seed=-1,
    ),
    "greedy and penalised": SamplingParams(repetition_penalty=1.2, frequency_penalty=0.4),
}


@pytest.fixture(scope="module")
def model() -> ToyModel:
    return toy(seed=1)


@pytest.fixture(scope="module")
def store(model: ToyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Datastore]:
    with make_datastore(tmp_path_factory.mktemp("store"), model) as store:
        yield store


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize(
    "mixture", [Mixture(1, 0.3, 1.0), MIXTURE, Mixture(500, 0.9, 20.0), Mixture(64, 0.9, 5.0, reach=30.0)]
)
def test_sequential_is_the_oracles_knn_lm(
    store: Datastore, model: ToyModel, mixture: Mixture, name: str
) -> None:
    found = decode(knn(store, mixture, stride="sequential"), model, SAMPLINGS[name], max_tokens=25)
    assert found.tokens == oracle(store, model, mixture, SAMPLINGS[name], 25)
    assert found.reason == "length"
    assert {token.source for step in found.steps for token in step.tokens} == {TARGET}
    assert [len(step.tokens) for step in found.steps] == [1] * 25


STRIDES: list[int | str] = [1, 2, 3, 7, 16, "os3", "cost-aware"]
DECODERS = ["plain", "respec", "prompt-lookup", "token-recycling", "sam-decoding"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "index"),
    [(1, "flat"), (8, "flat"), (64, "flat"), (256, "flat"), (900, "flat"), (1, "hnsw"), (256, "hnsw")],
)
def test_speculation_changes_no_token(store: Datastore, model: ToyModel, k: int, index: str) -> None:
    mixture = replace(MIXTURE, k=k, reach=random.choice([None, 30.0]))
    accepted = 0
    for name, sampling in SAMPLINGS.items():
        expected = decode(
            knn(store, mixture, index=index, stride="sequential"), model, sampling, max_tokens=30
        )
        for stride, asynchronous in itertools.product(random.sample(STRIDES, 2), (False, True)):
            method = knn(
                store,
                mixture,
                index=index,
                stride=stride,
                asynchronous=asynchronous,
                prefetch=random.choice([None, 1, 20]),
                max_match=random.choice([None, 0.6]),
                decoder=random.choice(DECODERS),
            )
            method.followers, method.capacity = random.choice([1, 10]), random.choice([5, 16_384])
            found = decode(method, model, sampling, max_tokens=30)
            case = (name, stride, asynchronous, method.decoder)
            assert found.tokens == expected.tokens, case
            assert (found.text, found.reason) == (expected.text, expected.reason), case
            assert found.session == expected.session, case
            accepted += sum(step.accepted for step in found.steps)
    assert accepted > 0


def test_a_decoder_reads_several_tokens_a_pass(store: Datastore, model: ToyModel) -> None:
    passes = {}
    for decoder in ("plain", "prompt-lookup"):
        records: list[KnnRecord] = []
        method = knn(store, MIXTURE, stride=4, decoder=decoder, watch=records.append)
        found = decode(method, model, max_tokens=80)
        (record,) = records
        assert sum(len(step.tokens) for step in found.steps) == 80
        passes[decoder] = sum(span.activity == "decode" for span in record.timeline)
        # Tokens that cost no pass are looked up and searched for with the others, whatever the stride is.
        assert any(round.stride > 4 for round in record.rounds) == (decoder != "plain")
    assert passes["plain"] >= 80
    assert passes["prompt-lookup"] < 0.8 * passes["plain"]


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_weights_at_the_ends(store: Datastore, model: ToyModel, weight: float) -> None:
    mixture = replace(MIXTURE, weight=weight)
    for sampling in SAMPLINGS.values():
        if weight == 1.0 and sampling.logit_bias:
            continue  # the oracle's tokens without a neighbour are not quite impossible
        found = decode(knn(store, mixture, stride=4), model, sampling)
        if weight == 0.0:
            assert found.tokens == decode(PlainDecoder(), model, sampling).tokens
        else:
            assert found.tokens[:25] == oracle(store, model, mixture, sampling, 25)


def test_guesses_are_the_caches_and_are_counted(store: Datastore, model: ToyModel) -> None:
    records: list[KnnRecord] = []
    method = knn(store, MIXTURE, stride=4, decoder="plain", watch=records.append)
    found = decode(method, model, max_tokens=80)
    (record,) = records
    assert sum(len(step.tokens) for step in found.steps) == 80
    for step, round in zip(found.steps, record.rounds, strict=True):
        assert step.drafted_by == ({SOURCE: round.stride - 1} if round.stride > 1 else {})
        assert step.accepted == min(round.matched, round.stride - 1)
        assert len(step.tokens) == min(round.matched + 1, round.stride)
        sources = [token.source for token in step.tokens]
        assert sources == [SOURCE] * step.accepted + [TARGET] * (len(sources) - step.accepted)
    assert all(round.stride <= 4 for round in record.rounds)
    matched = sum(round.matched for round in record.rounds)
    assert matched > 0.5 * sum(round.stride for round in record.rounds)  # the texts are the model's own
    passes = [span for span in record.timeline if span.activity == "decode"]
    searches = [span for span in record.timeline if span.activity == "search"]
    assert len(searches) == len(record.rounds)
    assert len(passes) == sum(round.stride for round in record.rounds)
    assert sum(span.kept for span in passes) == 80
    assert record.timing.total >= record.timing.searching + record.timing.decode


def test_last_guess_is_read_during_the_search(store: Datastore, model: ToyModel) -> None:
    records: list[KnnRecord] = []
    method = knn(store, MIXTURE, stride=3, asynchronous=True, watch=records.append)
    found = decode(method, model, max_tokens=60)
    (record,) = records
    full = [round for round in record.rounds if round.matched == round.stride]
    assert full
    assert sum(len(step.tokens) for step in found.steps) == 60
    three = [step for step in found.steps if step.drafted_by == {SOURCE: 3}]
    assert any(step.accepted == 3 for step in three)
    passes = sum(span.activity == "decode" for span in record.timeline)
    assert passes < sum(round.stride for round in record.rounds) + len(record.rounds)


def test_text_ends_as_without_speculation(store: Datastore, model: ToyModel) -> None:
    plain = decode(knn(store, MIXTURE, stride="sequential"), model, max_tokens=60)
    cases = [
        StopConditions(60, frozenset({plain.tokens[7]})),
        StopConditions(60, frozenset(), (plain.text[9:11],)),
        StopConditions(60, frozenset(), (plain.text[2],)),
        StopConditions(1),
        StopConditions(2),
    ]
    for stop in cases:
        expected = decode(knn(store, MIXTURE, stride="sequential"), model, stop=stop)
        for asynchronous in (False, True):
            method = knn(store, MIXTURE, stride=5, asynchronous=asynchronous)
            found = decode(method, model, stop=stop)
            assert (found.tokens, found.text, found.reason) == (
                expected.tokens,
                expected.text,
                expected.reason,
            )
            assert found.session == [*PROMPT, *expected.tokens]
    until = decode(knn(store, MIXTURE, stride=5), model, until=lambda tokens: len(tokens) == 16)
    assert (until.tokens, until.reason) == (plain.tokens[: 16 - len(PROMPT)], "stop")


def test_context_ends_as_without_speculation(store: Datastore, model: ToyModel) -> None:
    short = ToyModel(VOCABULARY, order=2, seed=1, context_length=20)
    expected = decode(knn(store, MIXTURE, stride="sequential"), short)
    assert len(expected.tokens) == 16
    assert expected.reason == "length"
    assert decode(PlainDecoder(), short).reason == "length"
    assert len(decode(PlainDecoder(), short).tokens) == 16
    for asynchronous, decoder, stride in itertools.product((False, True), DECODERS, (1, 6)):
        method = knn(store, MIXTURE, stride=stride, asynchronous=asynchronous, decoder=decoder)
        found = decode(method, short)
        assert (found.tokens, found.reason) == (expected.tokens, "length")


def test_log_probabilities_are_the_mixtures(store: Datastore, model: ToyModel) -> None:
    keys = store.halves.view(np.float16).astype(np.float32)
    found = decode(knn(store, MIXTURE, stride=3), model, log_probs=VOCABULARY)
    tokens = list(PROMPT)
    for token in (token for step in found.steps for token in step.tokens):
        assert token.log_prob is not None
        logits = model.logits(tokens).astype(np.float64)
        probs = 0.5 * np.exp(logits) / np.exp(logits).sum()
        near = nearest(model.logits(tokens), keys, 8)
        weights = np.exp(-np.array([distance for distance, _ in near]) / 5.0)
        for weight, (_, entry) in zip(weights / weights.sum(), near, strict=True):
            probs[store.values(np.array([entry]))[0]] += 0.5 * weight
        assert token.log_prob == pytest.approx(np.log(probs[token.token]), abs=1e-5)
        assert sum(np.exp(other.log_prob) for other in token.alternatives) == pytest.approx(1.0, abs=1e-5)
        told = [other.log_prob for other in token.alternatives]
        assert told == sorted(told, reverse=True)
        tokens.append(token.token)


def test_mixture_is_a_distribution_in_place_of_the_logits() -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 4, 50).astype(np.float32)
    before = logits.copy()
    values = generator.integers(0, 50, 30)
    near = neighbour_tokens(values, np.sort(generator.uniform(100, 900, 30)).astype(np.float32), 10.0)
    assert np.exp(near.log_probs).sum() == pytest.approx(1.0)
    for weight in (0.0, 0.25, 1.0):
        mixed = mix(logits, normaliser(logits), near, weight)
        assert np.exp(mixed.astype(np.float64) - normaliser(logits)).sum() == pytest.approx(1.0, abs=1e-5)
    assert np.array_equal(mix(logits, normaliser(logits), near, 0.0), logits)
    assert np.array_equal(logits, before)
    far = neighbour_tokens(np.array([3, 4]), np.array([0.0, 1e9], dtype=np.float32), 1.0)
    assert far.log_probs.tolist() == [0.0, -np.inf]
    assert np.isfinite(mix(logits, normaliser(logits), far, 0.5)).all()


def test_cache_holds_what_follows_and_no_more(store: Datastore) -> None:
    cache = FollowerCache(store, followers=3, capacity=12)
    query = store.halves[101].view(np.float16).astype(np.float32)
    assert len(cache.nearest(query, 4)) == 0

    def neighbours(*ids: int) -> Neighbours:
        return Neighbours(np.array(ids), np.zeros(len(ids), dtype=np.float32))

    last = len(store) - 1
    cache.add([neighbours(100, 200), neighbours(100, last)])
    found = cache.nearest(query, 10)
    assert set(found.ids.tolist()) == {101, 102, 103, 201, 202, 203}
    keys = store.halves.view(np.float16).astype(np.float32)
    order = nearest(query, keys[np.sort(found.ids)], 6)
    assert found.ids.tolist() == [int(np.sort(found.ids)[place]) for _, place in order]
    assert found.distances.tolist() == [distance for distance, _ in order]
    cache.add([neighbours(10, 20, 30)])
    assert len(cache) == 12
    assert set(cache.nearest(query, 12).ids.tolist()) >= {11, 12, 13, 21, 22, 23, 31, 32, 33}
    cache.add([neighbours(300, 310, 320, 330, 340)])
    assert set(cache.nearest(query, 12).ids.tolist()) == {
        *(301, 311, 321, 331, 341),
        *(302, 312, 322, 332, 342),
        *(303, 313),  # what comes next counts for more than what comes later
    }
    assert cache.nbytes <= 12 * (2 * store.dimension + 28)


def test_what_cannot_be_done_is_said_at_once(store: Datastore, tmp_path: Path) -> None:
    for weight in (-0.1, 1.1, float("nan"), "much"):
        with pytest.raises(InputError, match="lambda"):
            Mixture(weight=weight)  # type: ignore[arg-type]
    for temperature in (0.0, -1.0, float("inf")):
        with pytest.raises(InputError, match="knn_temperature"):
            Mixture(temperature=temperature)
    for reach in (0.0, -1.0, float("inf"), True):
        with pytest.raises(InputError, match="reach"):
            Mixture(reach=reach)
    for k in (0, 1025, 1.5):
        with pytest.raises(InputError, match="from 1 to 1,024"):
            Mixture(k=k)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"k: 1000 is not usable: .* 952"):
        KnnDecoder(store, KnnLM.Options(k=1000))
    assert KnnDecoder(store, KnnLM.Options()).mixture.k == len(store) == 952
    with pytest.raises(InputError, match="stride: 0 is not usable: give a whole number from 1 to 64"):
        KnnLM(stride=0)
    with pytest.raises(InputError, match=r"stride: 'os4' .* or one of cost-aware, os3, sequential"):
        KnnLM(stride="os4")
    with pytest.raises(InputError, match="max_match"):
        knn(store, MIXTURE, stride="os3", max_match=1.0)
    with pytest.raises(InputError, match="capacity"):
        FollowerCache(store, capacity=0)
    with pytest.raises(InputError, match="prefetch: 0 is not usable: give a whole number from 1"):
        KnnLM(prefetch=0)
    with pytest.raises(InputError, match="built without it"):
        knn(store, MIXTURE, index="pq")
    with pytest.raises(InputError, match="whose guesses another method can use, or plain"):
        speculative(knn(store, MIXTURE))
