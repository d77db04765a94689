"""Rerankers: cross-encoders that score a question and a passage together.

A reranker is slower but better than comparing vectors, so it only reorders the few passages that an index has found.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specrag.errors import InputError, ModelFilesError
from specrag.models import read_config_json
from specrag.models.catalog import ModelFiles, resolve
from specrag.retrieval.encoder.settings import check_modules

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Reranker:
    """Scores passages for a question.

    Args:
        name: the name to give to :func:`load_reranker`.
        files: its folder.
        model: the ``sentence_transformers.CrossEncoder``.
    """

    def __init__(self, name: str, files: ModelFiles, model: Any) -> None:
        self.name = name
        self._files = files
        self._model = model

    @property
    def tokenizer_file(self) -> Path | None:
        """Path of ``tokenizer.json``, for counting tokens; ``None`` if there is none."""
        file = self._files.folder / "tokenizer.json"
        return file if file.is_file() else None

    def score(self, question: str, texts: Sequence[str]) -> np.ndarray:
        """How well each text fits the question, float32 ``[texts]``; higher is better, the range depends on the model.

        A pair that is too long for the model is truncated, the longer of the two texts first. Each pair is computed
        alone, so a passage's score never depends on which others were found.

        Raises:
            InputError: something is not a text.
        """
        if not isinstance(question, str):
            raise InputError("question", question, "give a text")
        if isinstance(texts, str):
            raise InputError("texts", texts, "give a list of texts, not one text")
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise InputError(f"texts[{number}]", text, "give a text")
        if not texts:
            return np.empty(0, dtype=np.float32)
        return self._score(_clean(question), [_clean(text) for text in texts])

    def _score(self, question: str, texts: list[str]) -> np.ndarray:
        pairs = [(question, text) for text in texts]
        scores: torch.Tensor = self._model.predict(
            pairs, batch_size=1, convert_to_tensor=True, show_progress_bar=False
        )
        return scores.float().reshape(-1).cpu().numpy()


def load_reranker(name: str, *, dtype: str = "fp32", device: str | None = None) -> Reranker:
    """Load a cross-encoder with one score per pair.

    Args:
        name: a catalog name, a folder, or a hub id such as ``cross-encoder/ms-marco-MiniLM-L6-v2``.
        dtype: ``fp32`` or ``bf16``.
        device: ``cpu`` or ``cuda``; None takes a GPU if there is one.

    Raises:
        InputError: there is no such model, or it is not a cross-encoder with one score.
        ModelFilesError: files are missing, damaged or only available as pickles.
    """
    if not isinstance(name, str | Path) or not str(name):
        raise InputError(
            "reranker", name, "give a folder or a hub id such as cross-encoder/ms-marco-MiniLM-L6-v2"
        )
    if dtype not in _DTYPES:
        raise InputError("reranker_dtype", dtype, f"use one of {', '.join(_DTYPES)}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    files = checked_reranker(name)
    return Reranker(str(name), files, _load(files, _DTYPES[dtype], device))


def checked_reranker(name: str | Path) -> ModelFiles:
    """The files of a cross-encoder.

    Raises:
        InputError: there is no such model, it does not have exactly one trained score, or it would run foreign code.
        ModelFilesError: files are missing, damaged or only available as pickles.
    """
    files = resolve(name)
    config = read_config_json(files)
    architectures = config.get("architectures") or []
    labels = config.get("num_labels") or len(config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"})
    if not any("SequenceClassification" in architecture for architecture in architectures):
        found = ", ".join(architectures) or "no architecture"
        remedy = f"it is no cross-encoder but {found}: give a sequence classifier with one label"
        raise InputError("reranker", str(name), remedy)
    if labels != 1:
        raise InputError("reranker", str(name), f"it has {labels} labels: give a model with one score")
    check_modules("reranker", name, files.folder)
    return files


def _load(files: ModelFiles, dtype: torch.dtype, device: str) -> Any:
    from sentence_transformers import CrossEncoder

    try:
        return CrossEncoder(
            str(files.folder),
            device=device,
            local_files_only=True,
            trust_remote_code=False,
            model_kwargs={"dtype": dtype, "use_safetensors": True},
        )
    # The errors of transformers, its configuration classes and safetensors share no base class.
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise ModelFilesError(
            f"reranker: sentence-transformers cannot load {str(files.folder)!r} ({reason}): fetch the model again"
        ) from error


def _clean(text: str) -> str:
    # A tokenizer refuses half a surrogate pair, as found in damaged JSON.
    return text.encode("utf-8", "replace").decode("utf-8")
