"""Answers from only some of the passages, because a shard did not respond."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from specrag.engine import Coroutine
from specrag.request import Result


def mark_missing_shards(answering: Coroutine[Result], retriever: Any) -> Coroutine[Result]:
    """Mark a result with the shards that failed while it was made.

    Shards that failed for another request at the same time are included: a mark may be unnecessary but is never
    missing.

    Args:
        answering: makes the result.
        retriever: what is searched; one that has no shards leaves nothing to mark.
    """
    return _mark(answering, retriever) if hasattr(retriever, "missing_since") else answering


def _mark(answering: Coroutine[Result], retriever: Any) -> Coroutine[Result]:
    began = time.monotonic()
    result = yield from answering
    missing = missing_since(retriever, began)
    return replace(result, missing=missing) if missing else result


def missing_since(retriever: Any, moment: float) -> tuple[str, ...]:
    """The shards of a retriever that have failed to answer since a time of ``time.monotonic()``."""
    told = getattr(retriever, "missing_since", None)
    return () if told is None else tuple(told(moment))
