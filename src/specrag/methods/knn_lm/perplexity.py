"""The perplexity of a text under a language model, with and without the neighbours of a kNN-LM datastore.

The model reads the text in windows, many positions per pass, and the neighbours of a window are found in one search.
What is kept of them serves every weight, temperature and smaller k, so a sweep searches only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from specrag.engine import NOTHING, Coroutine, Outputs, Row, Search, Session, SessionModel
from specrag.errors import InputError
from specrag.methods.knn_lm.mixture import Mixture
from specrag.methods.knn_lm.store.build import vector
from specrag.methods.knn_lm.store.datastore import Datastore
from specrag.methods.knn_lm.store.index import KeyIndex, Neighbours, check_k
from specrag.methods.knn_lm.store.manifest import HIDDEN, WindowSettings
from specrag.methods.knn_lm.store.windows import Tokens, Window, entries_of, windows


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """Every token of a text but the first, as the model and the neighbours see it.

    Attributes:
        log_probs: of the model, nats, float64 [tokens].
        distances: squared, of the nearest entries, ascending, float32 [tokens, k]; k is 0 without a datastore.
        hits: whether such an entry's next token is the text's, bool [tokens, k].
    """

    log_probs: NDArray[np.float64]
    distances: NDArray[np.float32]
    hits: NDArray[np.bool_]

    def token_log_probs(self, mixture: Mixture | None = None) -> NDArray[np.float64]:
        """The log-probability of each token, in nats; ``None`` is the model alone.

        Raises:
            InputError: fewer neighbours were measured than the mixture takes.
        """
        if mixture is None:
            return self.log_probs
        return self._mixed(self._shares(mixture.k, mixture.temperature), mixture)

    def perplexity(self, mixture: Mixture | None = None) -> float:
        """``exp`` of the mean of the negative log-probabilities."""
        return _perplexity(self.token_log_probs(mixture))

    def sweep(self, mixtures: Iterable[Mixture]) -> list[float]:
        """The perplexity of each mixture; what several of them share is computed once.

        Raises:
            InputError: fewer neighbours were measured than a mixture takes.
        """
        shares = cache(self._shares)
        return [
            _perplexity(self._mixed(shares(mixture.k, mixture.temperature), mixture)) for mixture in mixtures
        ]

    def _shares(self, k: int, temperature: float) -> NDArray[np.float64]:
        """Each token's probability according to its neighbours alone."""
        if k > self.distances.shape[1]:
            raise InputError("k", k, f"{self.distances.shape[1]} neighbours were measured")
        near = self.distances[:, :k].astype(np.float64)
        weights = np.exp(-(near - near[:, :1]) / temperature)
        shares: NDArray[np.float64] = (weights * self.hits[:, :k]).sum(axis=1) / weights.sum(axis=1)
        return shares

    def _mixed(self, shares: NDArray[np.float64], mixture: Mixture) -> NDArray[np.float64]:
        weight = mixture.weights_at(self.distances[:, 0])
        with np.errstate(divide="ignore"):  # with a weight of 1 a token that no neighbour has is impossible
            found: NDArray[np.float64] = np.log(weight * shares + (1 - weight) * np.exp(self.log_probs))
        return found


def _perplexity(log_probs: NDArray[np.float64]) -> float:
    return float(np.exp(-log_probs.mean()))


def measuring(
    model: SessionModel,
    documents: Sequence[Tokens],
    settings: WindowSettings,
    datastore: Datastore | None = None,
    index: str = "flat",
    k: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Coroutine[Measured]:
    """A coroutine that measures some texts.

    Args:
        model: reads them.
        documents: the tokens of each text.
        settings: how they are cut; use the datastore's, otherwise the keys have other contexts.
        datastore: where the neighbours are; ``None`` measures the model alone.
        index: of the datastore.
        k: neighbours to keep for each token.
        progress: receives the number of tokens done and their total.

    Raises:
        InputError: there are no two tokens, or k is more than the datastore has.
    """
    total = entries_of(documents)
    if not total:
        raise InputError("text", f"{len(documents)} documents", "give a text of at least two tokens")
    keys: KeyIndex | None = None
    if datastore is not None:
        keys, k = datastore.index(index), check_k(k, len(datastore))
    log_probs = np.empty(total)
    distances = np.empty((total, k if keys is not None else 0), dtype=np.float32)
    hits = np.empty(distances.shape, dtype=np.bool_)
    done = 0
    for window in windows(documents, settings):
        rows = yield from _read(model, window)
        here = slice(done, done + len(rows))
        log_probs[here] = [float(row.log_probs[0]) for row in rows if row.log_probs is not None]
        if keys is not None and datastore is not None:
            queries = np.stack([vector(row.hidden[HIDDEN]) for row in rows])
            found: list[Neighbours] = yield Search(partial(keys.search, queries, k))
            distances[here] = [neighbours.distances for neighbours in found]
            values = datastore.values(np.stack([neighbours.ids for neighbours in found]))
            hits[here] = values == window.values[:, None]
        done += len(rows)
        if progress is not None:
            progress(done, total)
    return Measured(log_probs, distances, hits)


def _read(model: SessionModel, window: Window) -> Coroutine[list[Row]]:
    """The answers for the window's tokens that make entries."""
    wanted = [Outputs(log_probs_of=(token,), hidden=(HIDDEN,)) for token in window.values.tolist()]
    session = Session(model)
    try:
        # A session holds its newest token back, so one more is given, which is never read.
        rows = yield from session.extend([*window.tokens.tolist(), 0], [NOTHING] * window.skipped + wanted)
    finally:
        session.close()
    return rows[window.skipped :]
