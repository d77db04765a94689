"""Subsets of passages: distinct, of the right kind, and never more than there are."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrag.errors import InputError
from specrag.methods.speculative_rag.perspectives import (
    STRATEGIES,
    Strategy,
    cluster,
    cluster_for,
    needs_clusters,
    sample_subsets,
)


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=9),
    m=st.integers(1, 30),
    strategy=st.sampled_from(STRATEGIES),
    seed=st.integers(0, 5),
)
def test_subsets_are_distinct_and_of_their_kind(
    labels: list[int], m: int, strategy: Strategy, seed: int
) -> None:
    anchored = strategy in ("anchored", "anchored-whole")
    if anchored:  # the best passage is a cluster of its own
        labels = [5, *labels[1:]]
    count, k = len(labels), len(set(labels))
    sampled = sample_subsets(count, m, k, strategy, labels, seed)
    sets = [frozenset(subset) for subset in sampled.subsets]
    assert len(set(sets)) == len(sets) == min(m, sampled.possible)
    groups = [{i for i in range(count) if labels[i] == label} for label in dict.fromkeys(labels)]
    if strategy == "same-cluster":
        allowed = [frozenset(group) for group in groups]
    elif anchored and k == 2 < count:
        allowed = [frozenset({0, other}) for other in range(1, count)]
    elif strategy != "random" and needs_clusters(strategy, count, k):
        allowed = [frozenset(chosen) for chosen in product(*groups)]
    else:
        allowed = [frozenset(chosen) for chosen in combinations(range(count), k)]
    if strategy == "ranked":
        step = max(k - 1, 1)
        best = {0} if k > 1 else set()
        starts = range(len(best), count, step)
        allowed = [frozenset(best | {*range(start, min(start + step, count))}) for start in starts]
        allowed = allowed or [frozenset({0})]
        assert sets == allowed[:m]
    if not needs_clusters(strategy, count, k) and strategy == "same-cluster":
        allowed = [frozenset({i}) for i in range(count)] if k == count > 1 else [frozenset(range(count))]
    if strategy == "anchored-whole":
        assert sets[0] == frozenset(range(count))
        allowed = list({frozenset(range(count)), *allowed})
    assert set(sets) <= set(allowed)
    assert sampled.possible == len(allowed)
    assert sampled == sample_subsets(count, m, k, strategy, labels, seed)
    assert any("in place of" in note for note in sampled.notes) == (sampled.possible < m)


def test_ranked_drafts_have_the_best_passage_and_the_next_ones() -> None:
    sampled = sample_subsets(6, 5, 3, "ranked", None, 0)
    assert sampled.subsets == ((0, 1, 2), (0, 3, 4), (0, 5))
    assert sampled.notes == ("m is 3 in place of 5: they read all passages",)
    assert not needs_clusters("ranked", 6, 3)


def test_every_subset_is_as_likely_as_another() -> None:
    drawn = Counter(
        sample_subsets(6, 1, 2, "multi-perspective", [0, 0, 0, 0, 1, 1], seed).subsets[0]
        for seed in range(800)
    )
    assert len(drawn) == 8
    assert min(drawn.values()) > 60


def test_the_passage_of_the_smallest_cluster_stands_first() -> None:
    sampled = sample_subsets(6, 8, 2, "multi-perspective", [0, 0, 0, 0, 1, 1], 0)
    assert all(first in (4, 5) for first, _ in sampled.subsets)


def test_many_possible_subsets_take_no_time() -> None:
    labels = [number % 20 for number in range(1000)]
    sampled = sample_subsets(1000, 50, 20, "multi-perspective", labels, 0)
    assert sampled.possible == 50**20
    assert len(set(sampled.subsets)) == 50
    assert sample_subsets(1000, 50, 20, "random", None, 0).possible == math.comb(1000, 20)


def test_what_cannot_be_had_is_capped_and_said() -> None:
    one = sample_subsets(1, 5, 2, "multi-perspective", None, 0)
    assert one.subsets == ((0,),)
    assert one.notes == (
        "k is 1 in place of 2: there are no more passages",
        "m is 1 in place of 5: there are no more distinct subsets",
    )
    alike = sample_subsets(4, 2, 3, "multi-perspective", [0, 0, 1, 1], 0)
    assert alike.notes == ("2 clusters in place of 3: passages say the same",)
    assert all(len(subset) == 2 for subset in alike.subsets)


def test_all_passages_are_one_subset() -> None:
    for strategy in ("multi-perspective", "random"):
        assert sample_subsets(4, 5, 4, strategy, None, 0).subsets == ((0, 1, 2, 3),)
    assert sample_subsets(4, 5, 1, "same-cluster", None, 0).subsets == ((0, 1, 2, 3),)


def test_every_anchored_draft_begins_with_the_best_passage() -> None:
    vectors = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    clusters = cluster_for("anchored", vectors, 3, seed=0)
    assert clusters.count(0) == 1
    assert sorted(set(clusters)) == [0, 1, 2]
    assert cluster_for("multi-perspective", vectors, 3, seed=0) == cluster(vectors, 3, seed=0)
    for k, given_clusters in ((3, clusters), (2, None)):
        sampled = sample_subsets(8, 5, k, "anchored", given_clusters, 0)
        assert len(sampled.subsets) == 5
        assert {subset[0] for subset in sampled.subsets} == {0}
        assert all(len(set(subset)) == k for subset in sampled.subsets)


def test_an_anchor_alone_would_make_one_draft() -> None:
    sampled = sample_subsets(5, 3, 1, "anchored", None, 0)
    assert len(set(sampled.subsets)) == 3
    assert "no other beside the best" in sampled.notes[0]


def test_clusters_are_those_of_the_vectors() -> None:
    generator = np.random.default_rng(0)
    centres = np.eye(3, 8) * 5
    vectors = np.concatenate([centre + generator.normal(0, 0.1, (4, 8)) for centre in centres])
    order = generator.permutation(12)
    found = cluster(vectors[order].astype(np.float32), 3, seed=0)
    assert found[0] == 0  # numbered as they come
    assert {(label, place // 4) for label, place in zip(found, order, strict=True)} == {
        (label, centre) for label, centre in zip(found, order // 4, strict=True)
    }
    assert len(set(zip(found, (order // 4).tolist(), strict=True))) == 3
    assert found == cluster(vectors[order].astype(np.float32), 3, seed=0)


def outlying() -> np.ndarray:
    """Nine passages about one thing, and one about another."""
    generator = np.random.default_rng(0)
    near = np.array([1.0, 0, 0, 0]) + generator.normal(0, 0.05, (9, 4))
    return np.concatenate([near, [[0, 0, 0, 1.0]]]).astype(np.float32)


def test_a_passage_that_every_draft_reads_is_told() -> None:
    clusters = cluster_for("multi-perspective", outlying(), 2, seed=0)
    sampled = sample_subsets(10, 5, 2, "multi-perspective", clusters, seed=0)
    assert (sampled.shared, sampled.possible) == ((9,), 9)
    assert any("every draft reads passage 10" in note and "balanced" in note for note in sampled.notes)
    assert sample_subsets(10, 1, 2, "multi-perspective", clusters, seed=0).shared == ()


@pytest.mark.parametrize("seed", range(4))
def test_balanced_clusters_leave_no_passage_alone(seed: int) -> None:
    clusters = cluster_for("balanced", outlying(), 2, seed=seed)
    assert min(Counter(clusters).values()) >= 2
    assert clusters[0] == 0
    sampled = sample_subsets(10, 5, 2, "balanced", clusters, seed=seed)
    assert sampled.shared == ()
    assert sampled.possible > 9
    assert len(sampled.subsets) == 5
    few = cluster_for("balanced", outlying()[-3:], 2, seed=seed)
    assert sorted(Counter(few).values()) == [1, 2], "three passages make no two pairs"


def test_equal_vectors_make_one_cluster_without_a_warning() -> None:
    vectors = np.array([[1, 0], [1, 0], [0, 1]], dtype=np.float32)
    assert cluster(vectors, 3, seed=0) == (0, 0, 1)


def test_there_has_to_be_a_passage() -> None:
    with pytest.raises(InputError, match="passages: 0 is not usable: give at least one passage"):
        sample_subsets(0, 5, 2, "random", None, 0)
