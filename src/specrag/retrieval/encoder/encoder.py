"""Sentence encoders: map texts to unit vectors whose inner product is a similarity.

An encoder is any model in sentence-transformers' form, by catalog name, folder or hub id; its own files say how it
pools, how many tokens it reads and what to prepend to a query. BERTs run on a lean forward pass (``bert.py``), all
others through sentence-transformers itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from specrag.errors import InputError, ModelFilesError
from specrag.models import PackedLinear, read_config_json, read_weights
from specrag.models.catalog import SOURCES, ModelFiles, resolve
from specrag.retrieval.encoder.bert import Bert, BertShape
from specrag.retrieval.encoder.settings import EncoderSettings, checksums, read_settings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.bfloat16}
"""The dtypes that an encoder can compute in, by name; ``int8`` means 8-bit linear layers and bf16 activations."""

DEFAULT_ENCODER = "minilm-l6-v2"

#: Texts given to sentence-transformers at once, and texts that it pads to a common length.
_CHUNK, _PADDED = 2048, 32


class Network(Protocol):
    """A network that computes sentence vectors."""

    @property
    def dimension(self) -> int:
        """Number of elements of a vector."""
        ...

    def encode(
        self, texts: Sequence[str], prompt: str = "", progress: Callable[[int], None] | None = None
    ) -> np.ndarray:
        """Vectors of unit length, float32 ``[texts, dimension]``.

        Args:
            prompt: prepended to every text.
            progress: called with the number of texts finished since its last call.
        """
        ...


class Encoder:
    """Maps texts to unit vectors.

    Args:
        name: the name to give to :func:`load_encoder`.
        files: its folder.
        settings: the settings in its files.
        network: computes the vectors.
        dtype: one of :data:`DTYPES`.
    """

    def __init__(
        self, name: str, files: ModelFiles, settings: EncoderSettings, network: Network, dtype: str
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.settings = settings
        self.network = network
        self._files = files

    @property
    def dimension(self) -> int:
        """Number of elements of a vector."""
        return self.network.dimension

    @property
    def max_tokens(self) -> int:
        """The most tokens of a text that are read, including special tokens."""
        return self.settings.max_tokens

    @property
    def tokenizer_file(self) -> Path:
        """Path of ``tokenizer.json``, for counting tokens."""
        return self._files.folder / "tokenizer.json"

    @cached_property
    def fingerprint(self) -> str:
        """Changes when the vectors do: depends on weights, tokenizer, modules, prompts, token limit and dtype."""
        digest = hashlib.sha256(
            json.dumps(
                [
                    self.dtype,
                    self.settings.max_tokens,
                    self.settings.query_prompt,
                    self.settings.passage_prompt,
                    checksums(self._files),
                ]
            ).encode()
        )
        return digest.hexdigest()[:32]

    def encode_passages(
        self, texts: Sequence[str], progress: Callable[[int], None] | None = None
    ) -> np.ndarray:
        """Vectors of passages, float32 ``[texts, dimension]`` of unit length; their last bits depend on the batch.

        Args:
            texts: the passages.
            progress: called with the number of texts finished since its last call.

        Raises:
            InputError: something is not a text.
        """
        return self._encode(texts, self.settings.passage_prompt, progress)

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of queries, float32 ``[texts, dimension]`` of unit length.

        Each is encoded alone, so its bits do not depend on the other queries.

        Raises:
            InputError: something is not a text.
        """
        alone = [self._encode([text], self.settings.query_prompt, None) for text in _list_of_texts(texts)]
        return np.concatenate(alone) if alone else self._none()

    def _encode(
        self, texts: Sequence[str], prompt: str, progress: Callable[[int], None] | None
    ) -> np.ndarray:
        # A tokenizer refuses half a surrogate pair, as found in damaged JSON.
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in _list_of_texts(texts)]
        return self.network.encode(clean, prompt, progress) if clean else self._none()

    def _none(self) -> np.ndarray:
        return np.empty((0, self.dimension), dtype=np.float32)


class SentenceTransformersNetwork:
    """A model run by sentence-transformers, for architectures without a lean forward pass."""

    def __init__(self, folder: Path, *, max_tokens: int, dtype: torch.dtype, device: str) -> None:
        from sentence_transformers import SentenceTransformer

        try:
            self._model: Any = SentenceTransformer(
                str(folder),
                device=device,
                local_files_only=True,
                trust_remote_code=False,
                model_kwargs={"dtype": dtype, "use_safetensors": True},
            )
        # The errors of transformers, its configuration classes and safetensors share no base class.
        except Exception as error:
            reason = " ".join(str(error).split())[:160]
            raise ModelFilesError(
                f"encoder: sentence-transformers cannot load {str(folder)!r} ({reason}): fetch the model again"
            ) from error
        self._model.max_seq_length = max_tokens
        self.dimension = int(self._model.get_embedding_dimension() or 0)

    def encode(
        self, texts: Sequence[str], prompt: str = "", progress: Callable[[int], None] | None = None
    ) -> np.ndarray:
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        for start in range(0, len(order), _CHUNK):
            chunk = order[start : start + _CHUNK]
            found: torch.Tensor = self._model.encode(
                [texts[index] for index in chunk],
                prompt=prompt,
                batch_size=_PADDED,
                convert_to_tensor=True,
                normalize_embeddings=True,
                show_progress_bar=False,
            )
            # Normalise again in fp32: in bf16 the lengths are off by a thousandth.
            vectors[chunk] = torch.nn.functional.normalize(found.float(), dim=-1).cpu().numpy()
            if progress is not None:
                progress(len(chunk))
        return vectors


def default_dtype() -> str:
    """bf16 on a GPU or a processor that multiplies it, else fp32 (two Zen 3 cores: 38 against 3 texts per second)."""
    return "bf16" if torch.cuda.is_available() or PackedLinear.available() else "fp32"


def load_encoder(
    name: str = DEFAULT_ENCODER, *, dtype: str | None = None, device: str | None = None, lean: bool = True
) -> Encoder:
    """Load a sentence encoder.

    Args:
        name: a catalog name, a folder in sentence-transformers' form, or a hub id.
        dtype: one of :data:`DTYPES`; ``int8`` is for BERTs on the CPU. By default :func:`default_dtype`.
        device: ``cpu`` or ``cuda``; None takes a GPU if there is one.
        lean: false runs BERTs through sentence-transformers too, for comparison.

    Raises:
        InputError: there is no such model, it is not a sentence encoder, or a setting cannot be used.
        ModelFilesError: files are missing, damaged or only available as pickles.
    """
    known, files, settings = find_encoder(name)
    dtype = default_dtype() if dtype is None else dtype
    if dtype not in DTYPES:
        raise InputError("encoder_dtype", dtype, f"use one of {', '.join(DTYPES)}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = BertShape.read(read_config_json(files))
    network: Network
    if lean and shape is not None and settings.pooling is not None:
        if dtype == "int8" and device != "cpu":
            raise InputError("encoder_dtype", dtype, f"use bf16 on {device}")
        network = Bert(
            read_weights(files),
            shape,
            files.folder / "tokenizer.json",
            max_tokens=settings.max_tokens,
            pooling=settings.pooling,
            dtype=DTYPES[dtype],
            int8=dtype == "int8",
            device=device,
        )
    elif dtype == "int8":
        raise InputError("encoder_dtype", dtype, f"use bf16: {str(name)!r} has no 8-bit layers here")
    else:
        network = SentenceTransformersNetwork(
            files.folder, max_tokens=settings.max_tokens, dtype=DTYPES[dtype], device=device
        )
    return Encoder(known, files, settings, network, dtype)


def find_encoder(name: str) -> tuple[str, ModelFiles, EncoderSettings]:
    """A sentence encoder's name, valid in any working directory, its files, and their settings.

    Raises:
        InputError: there is no such model, or it is not a sentence encoder.
        ModelFilesError: files are missing, damaged or only available as pickles.
    """
    if not isinstance(name, str | Path) or not str(name):
        raise InputError("encoder", name, f"give a name such as {DEFAULT_ENCODER!r}, a folder or a hub id")
    files = resolve(name)
    # The folder is read again later, when the working directory may be another.
    files = replace(files, folder=files.folder.resolve())
    known = str(name) if str(name) in SOURCES or files.name == str(name) else str(files.folder)
    return known, files, read_settings(name, files)


def _list_of_texts(texts: Sequence[str]) -> Sequence[str]:
    if isinstance(texts, str):
        raise InputError("texts", texts, "give a list of texts, not one text")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"texts[{number}]", text, "give a text")
    return texts
