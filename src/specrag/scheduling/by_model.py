"""What requests learn together, kept apart by the model that computed it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from specrag.engine.passes import SessionModel

Learned = TypeVar("Learned")


class ByModel(Generic[Learned]):
    """One object for each loaded model: a pass of another model, device or dtype has another price.

    A model's weights may be wrapped anew for each call, as a borrowed ``transformers`` module is, and may be moved
    between calls. So what is learned belongs to the weights, where they are, and in what type.

    Args:
        make: makes the object of a model that was not seen before. It is forgotten with the model.
    """

    def __init__(self, make: Callable[[], Learned]) -> None:
        self._make = make
        self._learned: WeakKeyDictionary[object, dict[str, Learned]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, model: SessionModel) -> Learned:
        """What was learned of ``model``."""
        weights = getattr(model, "module", model)
        placed = f"{getattr(model, 'device', None)} {getattr(model, 'dtype', None)}"
        with self._lock:
            known = self._learned.setdefault(weights, {})
            if placed not in known:
                known[placed] = self._make()
            return known[placed]
