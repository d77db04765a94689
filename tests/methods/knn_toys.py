"""kNN-LM over toy models: a datastore of text that the model itself would write, a decoding, and a plain oracle."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specrag.engine.executor import run
from specrag.engine.passes import Coroutine
from specrag.engine.processors import build_processors
from specrag.engine.sampling import choose
from specrag.engine.sampling_params import SamplingParams
from specrag.engine.session import Session
from specrag.engine.stopping import FinishReason, StopConditions
from specrag.methods.base import Decoder
from specrag.methods.decoding import make_decoder
from specrag.methods.events import suppress_events
from specrag.methods.knn_lm import KnnLM
from specrag.methods.knn_lm.decoder import KnnDecoder, KnnRecord, speculative
from specrag.methods.knn_lm.mixture import Mixture
from specrag.methods.knn_lm.store.datastore import Datastore
from specrag.methods.knn_lm.store.index import GraphSettings
from specrag.methods.knn_lm.store.windows import Tokens
from specrag.methods.resources import Resources
from specrag.models.toy import ToyModel
from specrag.speculation.decode import Settings, Step
from tests.methods.knn_store.knn_toys import VOCABULARY, build, nearest

PROMPT = (3, 1, 4, 1, 5)


def written(model: ToyModel, count: int, length: int = 120, seed: int = 0) -> list[Tokens]:
    """Texts drawn from the model."""
    texts = []
    for number in range(count):
        tokens = [number % VOCABULARY]
        for place in range(length - 1):
            params = SamplingParams(temperature=0.8, seed=seed + number)
            tokens.append(choose(model.logits(tokens), params, place))
        texts.append(np.array(tokens, dtype=np.int32))
    return texts


def make_datastore(folder: Path, model: ToyModel, count: int = 8) -> Datastore:
    """With a graph."""
    build(folder, written(model, count), model=model, indexes=[GraphSettings(ef_search=16)])
    return Datastore.open(folder)


def knn(
    store: Datastore,
    mixture: Mixture,
    decoder: str = "adaptive",
    *,
    watch: Callable[[KnnRecord], None] | None = None,
    **values: Any,
) -> KnnDecoder:
    """kNN-LM with these options; the decoder has learned nothing yet."""
    options = KnnLM.Options(
        k=mixture.k,
        weight=mixture.weight,
        knn_temperature=mixture.temperature,
        knn_reach=mixture.reach,
        decoder=decoder,
        **values,
    )
    guesses = None if decoder == "plain" else speculative(make_decoder(decoder, Resources()))
    return KnnDecoder(store, options, guesses, watch=watch)


class Letters:
    """A text sink that shows token n as a letter."""

    def push(self, token: int) -> str:
        return chr(ord("a") + token)

    def finish(self) -> str:
        return ""


@dataclass(frozen=True)
class Decoded:
    """What came of a decoding."""

    tokens: list[int]
    text: str
    reason: FinishReason
    steps: list[Step]
    session: list[int]


def decode(
    method: Decoder,
    model: ToyModel,
    sampling: SamplingParams | None = None,
    *,
    max_tokens: int = 40,
    stop: StopConditions | None = None,
    log_probs: int | None = None,
    prompt: Sequence[int] = PROMPT,
    until: Callable[[Sequence[int]], bool] | None = None,
) -> Decoded:
    """Decode behind a prompt in an executor."""
    settings = Settings(
        stop or StopConditions(max_tokens), sampling or SamplingParams(), log_probs, until=until
    )
    session = Session(model)
    emitted: list[object] = []

    def request() -> Coroutine[FinishReason]:
        yield from session.extend(prompt)
        clock = _counting()
        return (yield from suppress_events(method.decode(session, settings, Letters(), clock), emitted))

    reason = run(request())
    steps = [step for step in emitted if isinstance(step, Step)]
    tokens = [token.token for step in steps for token in step.tokens]
    return Decoded(tokens, "".join(step.text for step in steps), reason, steps, list(session.tokens))


def _counting() -> Callable[[], float]:
    """A clock by which everything takes a moment."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.001
        return now

    return clock


def oracle(
    store: Datastore, model: ToyModel, mixture: Mixture, sampling: SamplingParams, count: int
) -> list[int]:
    """kNN-LM in plain arithmetic, all keys compared one by one."""
    keys = store.halves.view(np.float16).astype(np.float32)
    chain = build_processors(sampling)
    tokens = list(PROMPT)
    state = chain.start(tokens)
    for _ in range(count):
        logits = model.logits(tokens)
        weights: Counter[int] = Counter()
        near = nearest(logits, keys, mixture.k)
        share = mixture.weight * math.exp(-near[0][0] / mixture.reach) if mixture.reach else mixture.weight
        for distance, entry in near:
            weights[int(store.values(np.array([entry]))[0])] += math.exp(-distance / mixture.temperature)  # type: ignore[assignment]
        total = sum(weights.values())
        model_sum = float(np.exp(logits.astype(np.float64)).sum())
        shares: defaultdict[int, float] = defaultdict(float)
        for token in range(VOCABULARY):
            own = math.exp(float(logits[token])) / model_sum
            shares[token] = share * weights[token] / total + (1 - share) * own
        mixed = np.array([math.log(shares[token] * model_sum + 1e-300) for token in range(VOCABULARY)])
        token = choose(chain.apply(mixed.astype(np.float32), state), sampling, len(tokens))
        state = chain.advance(state, token)
        tokens.append(token)
    return tokens[len(PROMPT) :]
