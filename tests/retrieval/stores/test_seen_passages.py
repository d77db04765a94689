"""What a remote store remembers: the passages used last, with the vectors that came with them."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrag.errors import InputError
from specrag.retrieval.stores.base import Fetched
from specrag.retrieval.stores.seen_passages import SeenPassages
from tests.retrieval.stores.tables import passage

IDS = st.lists(st.integers(0, 12), max_size=8)
STEPS = st.lists(st.tuples(st.sampled_from(["add", "vectors", "passages"]), IDS), max_size=25)


def _vector(id: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.array([id, -id, id / 3], dtype=np.float32)


@given(capacity=st.integers(1, 9), steps=STEPS)
def test_it_holds_what_was_used_last(capacity: int, steps: list[tuple[str, list[int]]]) -> None:
    seen = SeenPassages(capacity, 3)
    model: OrderedDict[int, None] = OrderedDict()
    for step, ids in steps:
        known = [id in model for id in ids]
        if step == "add":
            seen.add([Fetched(passage(id), _vector(id)) for id in ids])
        elif step == "vectors":
            out = np.full((len(ids), 3), 7, dtype=np.float32)
            assert seen.vectors(np.array(ids, dtype=np.int64), out).tolist() == known
            expected = [
                _vector(id).tolist() if there else [7, 7, 7] for id, there in zip(ids, known, strict=True)
            ]
            assert out.tolist() == expected
        else:
            expected_passages = [passage(id) if there else None for id, there in zip(ids, known, strict=True)]
            assert seen.passages(ids) == expected_passages
        for id in ids:
            if step == "add" or id in model:
                model[id] = None
                model.move_to_end(id)
                if len(model) > capacity:
                    model.popitem(last=False)
        assert len(seen) == len(model) <= capacity


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True])
def test_a_capacity_that_cannot_be(capacity: int) -> None:
    with pytest.raises(InputError, match=r"^remembered: "):
        SeenPassages(capacity, 3)
