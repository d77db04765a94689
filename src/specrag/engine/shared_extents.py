"""Extents that several segments of a pass read: one product serves the rows of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrag.engine.kv import Extent
from specrag.engine.segment_plan import SegmentPlan


@dataclass(frozen=True, slots=True)
class SharedExtent:
    """An extent, how many of its rows are read, and the rows of the pass that read it."""

    extent: Extent
    rows: int
    members: list[slice]


def find_shared(
    plans: Sequence[SegmentPlan], group: int
) -> tuple[list[SharedExtent], dict[int, list[tuple[int, slice]]]]:
    """Join the reads of extents that are read to the same row.

    Returns:
        The extents, and for each plan that reads some, by its ``id``, which of them, and its rows in their products.
    """
    readers: dict[tuple[int, int], list[SegmentPlan]] = {}
    for plan in plans:
        for extent, rows in plan.runs:
            readers.setdefault((id(extent), rows), []).append(plan)
    shared: list[SharedExtent] = []
    reads: dict[int, list[tuple[int, slice]]] = {}
    index = {}
    for key, members in readers.items():
        extent = next(extent for extent, _ in members[0].runs if id(extent) == key[0])
        index[key] = len(shared)
        shared.append(SharedExtent(extent, key[1], [plan.rows for plan in members]))
    for plan in plans:
        for extent, rows in plan.runs:
            number = index[id(extent), rows]
            start = 0
            for member in shared[number].members:
                if member is plan.rows:
                    break
                start += member.stop - member.start
            within = slice(start * group, (start + plan.count) * group)
            reads.setdefault(id(plan), []).append((number, within))
    return shared, reads
