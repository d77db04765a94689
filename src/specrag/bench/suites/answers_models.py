"""The models of the answers suite, loaded when they are first needed: a run that only resumes loads nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specrag.methods.local_generator import LocalGenerator
from specrag.retrieval.question_vectors import QuestionVectors

if TYPE_CHECKING:
    from specrag.language_model import LanguageModel
    from specrag.models.scoring import LocalScorer


class Models:
    """Language models by name, and the vectors for clustering.

    Args:
        device: torch's name of it.
        dtype: how all of them hold their weights.
    """

    def __init__(self, device: str, dtype: str) -> None:
        self._device = device
        self._dtype = dtype
        self._loaded: dict[tuple[str, Path | None], LanguageModel] = {}
        self._vectors: QuestionVectors | None = None

    @property
    def vectors(self) -> QuestionVectors:
        """The default encoder, warm."""
        if self._vectors is None:
            from specrag.methods.perspectives import cluster
            from specrag.retrieval.passage import Passage

            self._vectors = QuestionVectors()
            # What a server pays once is no part of an answer's time.
            cluster(self._vectors.embed("?", [Passage(0, "", "", "", "?", {})]), 1, 0)
        return self._vectors

    def get(self, name: str, adapter: Path | None = None) -> LanguageModel:
        """The model, loaded and warm."""
        if (name, adapter) not in self._loaded:
            from specrag.language_model import load

            llm = load(name, device=self._device, dtype=self._dtype, adapter=adapter)
            llm.generate("Hello", max_tokens=2)
            self._loaded[name, adapter] = llm
        return self._loaded[name, adapter]

    def generator(self, name: str, method: str = "plain", *, adapter: Path | None = None) -> LocalGenerator:
        """The model as a writer."""
        return LocalGenerator(self.get(name, adapter), method=method)

    def scorer(self, name: str) -> LocalScorer:
        """The model as a scorer."""
        from specrag.models.scoring import LocalScorer

        return LocalScorer(self.get(name).loaded)

    def close(self) -> None:
        """Give the memory back."""
        for llm in self._loaded.values():
            llm.close()
        self._loaded.clear()
