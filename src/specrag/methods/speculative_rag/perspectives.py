"""Which passages each draft reads: multi-perspective sampling (Speculative RAG, section 3.2) and its alternatives.

The paper clusters the passages by vectors that are conditioned on the question and takes one passage of each cluster,
until there are m distinct subsets. Cases it leaves open (fewer passages than clusters, fewer subsets than drafts) are
capped here and reported in the result.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Literal, TypeAlias, get_args

import numpy as np

from specrag.errors import InputError

#: ``multi-perspective``: one passage of each cluster. ``random``: any k passages. ``same-cluster``: all passages of one
#: cluster (Table 3's ablation). ``anchored``, our own: the best passage and one of each cluster of the others, since a
#: draft from the others alone may be about somebody of the same name. ``anchored-whole``: the same, except for the
#: first draft, which reads all passages. ``balanced``, our own: like ``multi-perspective``, but a passage far from all
#: others does not form a cluster of its own, which every draft would read: it joins the nearest one. ``ranked``, our
#: own: the best passage and the next k - 1 as they were found, then the k - 1 after them, and so on; nothing is drawn
#: or embedded.
Strategy: TypeAlias = Literal[
    "multi-perspective", "random", "same-cluster", "anchored", "anchored-whole", "balanced", "ranked"
]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
_ANCHORED = ("anchored", "anchored-whole")

#: Restarts of K-means, as scikit-learn has had it; a few passages cost about a millisecond each.
_RESTARTS = 4

#: Up to this many subsets are enumerated to draw from; with more of them, random draws hardly ever repeat.
_ENUMERATED = 4096


@dataclass(frozen=True, slots=True)
class Sampled:
    """The subsets.

    Attributes:
        subsets: for each draft the indices of its passages; no two hold the same passages.
        clusters: the cluster of each passage; ``None`` if nothing was clustered.
        possible: how many distinct subsets there are.
        shared: indices of the passages that every one of several drafts reads.
        notes: what was requested but not possible, for people.
    """

    subsets: tuple[tuple[int, ...], ...]
    clusters: tuple[int, ...] | None
    possible: int
    notes: tuple[str, ...] = ()
    shared: tuple[int, ...] = ()


def needs_clusters(strategy: Strategy, passages: int, k: int) -> bool:
    """Whether a strategy must look at the passages: not if a subset holds one (beside the best passage), or all."""
    drawn = strategy not in ("random", "ranked")
    return drawn and (2 if strategy in _ANCHORED else 1) < k < passages


def cluster_for(strategy: Strategy, vectors: np.ndarray, k: int, seed: int) -> tuple[int, ...]:
    """The cluster of each passage as a strategy needs it: for anchored drafts the best one is a cluster of its own.

    Args:
        vectors, k, seed: see :func:`cluster`.
    """
    if strategy == "balanced":
        return _balanced(vectors, k, seed)
    if strategy not in _ANCHORED:
        return cluster(vectors, k, seed)
    return (0, *(1 + label for label in cluster(vectors[1:], k - 1, seed)))


def cluster(vectors: np.ndarray, k: int, seed: int) -> tuple[int, ...]:
    """K-means by scikit-learn; a cluster may stay empty if vectors are equal.

    Args:
        vectors: float32 ``[passages, dimension]``.
        k: clusters, at most as many as there are passages.
        seed: the same seed gives the same clusters.

    Returns:
        The cluster of each passage, numbered in the order of their first passages.
    """
    from sklearn.cluster import KMeans  # a second to import

    exact = np.asarray(vectors, dtype=np.float64)
    # With fewer distinct vectors than clusters scikit-learn would warn and leave some of them empty anyway.
    count = min(k, len(np.unique(exact, axis=0)))
    found = KMeans(n_clusters=count, n_init=_RESTARTS, random_state=seed).fit_predict(exact)
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(int(label), len(numbers)) for label in found)


def _balanced(vectors: np.ndarray, k: int, seed: int) -> tuple[int, ...]:
    """Clusters of at least two passages, as far as there are enough: a passage left alone joins the nearest one."""
    kept = list(range(len(vectors)))
    labels = cluster(vectors, k, seed)
    while True:
        alone = [place for place, label in zip(kept, labels, strict=True) if labels.count(label) == 1]
        if not alone or len(kept) - len(alone) < 2 * k:
            break
        kept = [place for place in kept if place not in alone]
        labels = cluster(vectors[kept], k, seed)
    found = dict(zip(kept, labels, strict=True))
    centres = {label: vectors[[p for p in kept if found[p] == label]].mean(axis=0) for label in set(labels)}
    numbers: dict[int, int] = {}
    for place in range(len(vectors)):
        if place not in found:
            found[place] = min(
                centres, key=lambda label: float(np.linalg.norm(vectors[place] - centres[label]))
            )
        numbers.setdefault(found[place], len(numbers))
    return tuple(numbers[found[place]] for place in range(len(vectors)))


def sample_subsets(
    passages: int, m: int, k: int, strategy: Strategy, clusters: Sequence[int] | None, seed: int
) -> Sampled:
    """Draw the passages of each draft.

    Args:
        passages: how many there are, best first; at least one.
        m: how many drafts.
        k: passages per draft; with ``same-cluster`` the number of clusters.
        strategy: one of :data:`STRATEGIES`.
        clusters: the cluster of each passage, if :func:`needs_clusters`.
        seed: the same seed gives the same subsets.

    Raises:
        InputError: there are no passages.
    """
    if passages < 1:
        raise InputError("passages", passages, "give at least one passage")
    notes = []
    if k > passages:
        notes.append(f"k is {passages} in place of {k}: there are no more passages")
        k = passages
    if strategy in _ANCHORED and k == 1 < passages:
        notes.append(
            "drafts of one passage have room for no other beside the best: they are drawn as at random"
        )
    generator = random.Random(seed)
    whole = [tuple(range(passages))] if strategy == "anchored-whole" else []
    dealt = m - len(whole)
    drawn: _Drawn
    if strategy == "ranked":
        clusters = None
        drawn = _in_order(passages, k, m)
    elif strategy in _ANCHORED and k == 2 < passages:
        clusters = None
        drawn = _draw_across([[0], range(1, passages)], dealt, generator)
    elif not needs_clusters(strategy, passages, k):
        clusters = None
        # One cluster holds all passages; as many clusters as passages hold one each.
        size = k if strategy != "same-cluster" else passages if k == 1 else 1
        drawn = _draw_any(passages, size, dealt, generator)
    else:
        assert clusters is not None
        groups = _groups(clusters)
        if len(groups) < k:
            notes.append(f"{len(groups)} clusters in place of {k}: passages say the same")
        draw = _draw_clusters if strategy == "same-cluster" else _draw_across
        drawn = draw(groups, dealt, generator)
    # If k is the number of passages, the draft of all passages is not a different one.
    subsets = tuple(dict.fromkeys([*whole, *drawn.subsets]))
    possible = drawn.possible + len(whole) * (k < passages)
    if len(subsets) < m:
        why = "they read all passages" if strategy == "ranked" else "there are no more distinct subsets"
        notes.append(f"m is {len(subsets)} in place of {m}: {why}")
    shared = _shared(strategy, clusters) if len(subsets) > 1 else ()
    if shared:
        read = " and ".join(str(passage + 1) for passage in shared)
        remedy = "; strategy='balanced' deals it out like the others" if strategy != "balanced" else ""
        notes.append(f"every draft reads passage {read}, alone in its cluster{remedy}")
    return Sampled(subsets, None if clusters is None else tuple(clusters), possible, tuple(notes), shared)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Distinct subsets, and how many are possible."""

    subsets: Sequence[tuple[int, ...]]
    possible: int


def _shared(strategy: Strategy, clusters: Sequence[int] | None) -> tuple[int, ...]:
    """The passages that are alone in their cluster, if a draft takes one of each."""
    if clusters is None or strategy not in ("multi-perspective", "balanced"):
        return ()
    return tuple(passage for passage, label in enumerate(clusters) if list(clusters).count(label) == 1)


def _groups(clusters: Sequence[int]) -> list[list[int]]:
    """The passages of each cluster that has any, smallest cluster first.

    Drafts that begin with the same passage share the reading of it.
    """
    members: dict[int, list[int]] = {}
    for passage, label in enumerate(clusters):
        members.setdefault(label, []).append(passage)
    return sorted(members.values(), key=lambda group: (len(group), group))


def _in_order(passages: int, size: int, m: int) -> _Drawn:
    """The best passage with the next ones, with those after them, and so on; single passages if a draft has one."""
    best, step = (0,) if size > 1 else (), max(size - 1, 1)
    others = range(len(best), passages)
    subsets = [(*best, *others[start : start + step]) for start in range(0, len(others), step)]
    return _Drawn(subsets[:m], len(subsets))


def _draw_any(passages: int, size: int, m: int, generator: random.Random) -> _Drawn:
    """Any passages, in order."""
    possible = math.comb(passages, size)
    return _distinct(
        possible,
        m,
        generator,
        lambda: tuple(sorted(generator.sample(range(passages), size))),
        lambda: combinations(range(passages), size),
    )


def _draw_across(groups: Sequence[Sequence[int]], m: int, generator: random.Random) -> _Drawn:
    """One passage of each group."""
    possible = math.prod(len(group) for group in groups)
    return _distinct(
        possible,
        m,
        generator,
        lambda: tuple(generator.choice(group) for group in groups),
        lambda: product(*groups),
    )


def _draw_clusters(groups: Sequence[Sequence[int]], m: int, generator: random.Random) -> _Drawn:
    """Draw whole groups."""
    chosen = generator.sample(range(len(groups)), min(m, len(groups)))
    return _Drawn([tuple(groups[place]) for place in chosen], len(groups))


def _distinct(
    possible: int,
    m: int,
    generator: random.Random,
    draw: Callable[[], tuple[int, ...]],
    enumerate_all: Callable[[], Iterable[tuple[int, ...]]],
) -> _Drawn:
    """At most ``m`` distinct subsets, each set equally likely.

    Few are enumerated, many are drawn until enough differ: at least three in four draws then give a new one.
    """
    wanted = min(m, possible)
    if possible <= max(4 * m, _ENUMERATED):
        return _Drawn(generator.sample(list(enumerate_all()), wanted), possible)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < wanted:
        found.setdefault(draw())
    return _Drawn(list(found), possible)
