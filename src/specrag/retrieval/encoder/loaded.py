"""The encoders and rerankers of a process, each of which is loaded once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specrag.retrieval.encoder.encoder import Encoder
    from specrag.retrieval.encoder.reranker import Reranker


class Encoders:
    """Encoders and rerankers by name, loaded on first use; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._encoders: dict[tuple[str, str], Encoder] = {}
        self._rerankers: dict[str, Reranker] = {}

    def encoder(self, name: str, dtype: str | None = None) -> Encoder:
        """An encoder; takes a second the first time.

        Args:
            name, dtype: see :func:`~specrag.retrieval.encoder.encoder.load_encoder`.

        Raises:
            InputError: there is no such model, it is not an encoder, or it does not support this dtype.
            ModelFilesError: its files are missing or damaged.
        """
        if dtype is None:
            from specrag.retrieval.encoder.encoder import default_dtype  # it imports torch

            dtype = default_dtype()
        with self._lock:
            if (name, dtype) not in self._encoders:
                self._encoders[name, dtype] = self._load_encoder(name, dtype)
            return self._encoders[name, dtype]

    def reranker(self, name: str) -> Reranker:
        """A cross-encoder; takes seconds the first time.

        Raises:
            InputError: there is no such model, or it is not a cross-encoder with one score.
            ModelFilesError: its files are missing or damaged.
        """
        with self._lock:
            if name not in self._rerankers:
                self._rerankers[name] = self._load_reranker(name)
            return self._rerankers[name]

    def _load_encoder(self, name: str, dtype: str) -> Encoder:
        from specrag.retrieval.encoder.encoder import load_encoder

        return load_encoder(name, dtype=dtype)

    def _load_reranker(self, name: str) -> Reranker:
        from specrag.retrieval.encoder.reranker import load_reranker

        return load_reranker(name)
