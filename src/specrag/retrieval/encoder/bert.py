"""A lean BERT for sentence vectors: fused projections, and passes of only a few shapes.

Texts of about the same length are padded to a multiple of sixteen tokens and fill a pass of fixed size. For every new
shape, oneDNN compiles kernels and keeps them: without padding, the texts of a large corpus led to thousands of kernels,
which took two gigabytes of memory. Supported are models of type ``bert`` in config.json (MiniLM, BGE, E5, GTE);
``docs/results/retrieval.md`` compares it with sentence-transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from specrag.engine.cpu.spinning import watch_others
from specrag.errors import ModelFilesError
from specrag.models import Linear, build_linear
from specrag.retrieval.encoder.settings import Pooling

#: Rows of one pass. More rows did not make the products faster (CPU), and intermediate results would leave the cache.
_ROWS = {"cpu": 2048, "cuda": 32768}
#: Texts are padded to a multiple of this many tokens.
_PADDING = 16
#: Texts tokenised at once: the tokenizer's result is a hundred times as large as the ids that are kept.
_TOKENISED = 1024


@dataclass(frozen=True)
class BertShape:
    """The sizes of a BERT, from its config.json."""

    layers: int
    hidden: int
    heads: int
    norm_epsilon: float

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> BertShape | None:
        """Read the sizes; None if the lean forward pass does not support this configuration."""
        if (
            config.get("model_type") != "bert"
            or config.get("hidden_act", "gelu") != "gelu"
            or config.get("position_embedding_type", "absolute") != "absolute"
            or config.get("is_decoder", False)
        ):
            return None
        try:
            return cls(
                config["num_hidden_layers"],
                config["hidden_size"],
                config["num_attention_heads"],
                config.get("layer_norm_eps", 1e-12),
            )
        except KeyError:
            return None


@dataclass(frozen=True)
class _Norm:
    weight: torch.Tensor
    bias: torch.Tensor
    epsilon: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


@dataclass(frozen=True)
class _Layer:
    qkv: Linear
    output: Linear
    attention_norm: _Norm
    up: Linear
    down: Linear
    norm: _Norm


class Bert:
    """Maps texts to sentence vectors.

    Args:
        weights: tensors under transformers' names, with or without the prefix ``bert.``.
        tokenizer_file: the model's ``tokenizer.json``.
        max_tokens: longer texts are truncated.
        pooling: the mean over a text's tokens, or its first token.
        dtype: dtype of the activations; the 8-bit layers quantise, and return this dtype.

    Raises:
        ModelFilesError: a tensor is missing.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        shape: BertShape,
        tokenizer_file: Path,
        *,
        max_tokens: int,
        pooling: Pooling,
        dtype: torch.dtype,
        int8: bool,
        device: str,
    ) -> None:
        self.dimension = shape.hidden
        self._shape = shape
        self._pooling = pooling
        self._device = torch.device(device)
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_tokens)
        reader = _Reader(weights, shape, dtype, int8, self._device)
        self._words = reader.tensor("embeddings.word_embeddings.weight")
        # In a single text, every token has the first token type.
        self._positions = (
            reader.tensor("embeddings.position_embeddings.weight")
            + reader.tensor("embeddings.token_type_embeddings.weight")[:1]
        )
        self._norm = reader.norm("embeddings.LayerNorm")
        self._layers = [reader.layer(f"encoder.layer.{number}.") for number in range(shape.layers)]

    def encode(
        self, texts: Sequence[str], prompt: str = "", progress: Callable[[int], None] | None = None
    ) -> np.ndarray:
        """Sentence vectors, float32 ``[texts, dimension]`` of unit length.

        Args:
            prompt: prepended to every text.
            progress: called with the number of texts finished since its last call.
        """
        ids = self._tokenise(texts, prompt)
        vectors = np.empty((len(ids), self.dimension), dtype=np.float32)
        # The longest first, so that a batch that does not fit into memory fails at once.
        order = sorted(range(len(ids)), key=lambda index: -len(ids[index]))
        for batch in _batches(order, ids, _ROWS.get(self._device.type, _ROWS["cpu"])):
            vectors[list(batch)] = self._forward([ids[index] for index in batch])
            if progress is not None:
                progress(len(batch))
        return vectors

    def _tokenise(self, texts: Sequence[str], prompt: str) -> list[np.ndarray]:
        ids: list[np.ndarray] = []
        for start in range(0, len(texts), _TOKENISED):
            encoded = self._tokenizer.encode_batch_fast(
                [prompt + text for text in texts[start : start + _TOKENISED]]
            )
            ids.extend(np.array(entry.ids, dtype=np.int32) for entry in encoded)
        return ids

    @torch.inference_mode()
    def _forward(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        """Vectors of texts, float32 ``[texts, dimension]``."""
        watch_others()
        lengths = np.array([len(text) for text in texts])
        width = min(_padded(int(lengths.max())), len(self._positions))
        padded = np.zeros((len(texts), width), dtype=np.int32)
        inside = np.arange(padded.shape[1]) < lengths[:, None]
        padded[inside] = np.concatenate(texts)
        ids = torch.from_numpy(padded).to(self._device)
        mask = torch.from_numpy(inside).to(self._device)
        x = F.embedding(ids, self._words).add_(self._positions[: ids.shape[1]])
        x = self._norm(x).flatten(0, 1)  # [texts * length, hidden]
        # Added to the scores, [texts, 1, 1, length]: masks the positions after a text's end.
        ends = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill_(~mask, -torch.inf)
        for layer in self._layers:
            mixed = self._attend(layer.qkv(x), ends[:, None, None, :])
            x = layer.attention_norm(layer.output(mixed, x))
            x = layer.norm(layer.down(F.gelu(layer.up(x)), x))
        return F.normalize(self._pool(x.view(*ids.shape, -1), mask), dim=-1).cpu().numpy()

    def _attend(self, qkv: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Attention of each text over itself: ``[rows, 3 * hidden]`` -> ``[rows, hidden]``."""
        heads, width = self._shape.heads, self._shape.hidden // self._shape.heads
        texts, length = ends.shape[0], ends.shape[-1]
        # [3, texts, heads, length, width]; the scale of the scores is part of the weights
        query, key, value = qkv.view(texts, length, 3, heads, width).permute(2, 0, 3, 1, 4)
        shares = torch.softmax((query @ key.transpose(-1, -2)).add_(ends), dim=-1)
        mixed: torch.Tensor = (shares @ value).transpose(1, 2).reshape(texts * length, heads * width)
        return mixed

    def _pool(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self._pooling == "cls":
            return x[:, 0].float()
        weights = mask[:, :, None].float()
        mean: torch.Tensor = (x.float() * weights).sum(dim=1) / weights.sum(dim=1)
        return mean


class _Reader:
    """Converts the weights to the layout of the forward pass."""

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        shape: BertShape,
        dtype: torch.dtype,
        int8: bool,
        device: torch.device,
    ) -> None:
        self._weights = weights
        self._prefix = "" if "embeddings.word_embeddings.weight" in weights else "bert."
        self._shape = shape
        self._dtype = dtype
        self._int8 = int8
        self._device = device

    def tensor(self, name: str) -> torch.Tensor:
        try:
            # A copy: the file may be replaced while its pages are still mapped.
            return self._weights[self._prefix + name].to(self._device, self._dtype, copy=True)
        except KeyError as error:
            raise ModelFilesError(f"encoder: its weights lack {name!r}: fetch the model again") from error

    def norm(self, name: str) -> _Norm:
        return _Norm(self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias"), self._shape.norm_epsilon)

    def linear(self, name: str) -> Linear:
        return build_linear(self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias"), int8=self._int8)

    def layer(self, prefix: str) -> _Layer:
        return _Layer(
            qkv=self._qkv(f"{prefix}attention.self."),
            output=self.linear(f"{prefix}attention.output.dense"),
            attention_norm=self.norm(f"{prefix}attention.output.LayerNorm"),
            up=self.linear(f"{prefix}intermediate.dense"),
            down=self.linear(f"{prefix}output.dense"),
            norm=self.norm(f"{prefix}output.LayerNorm"),
        )

    def _qkv(self, prefix: str) -> Linear:
        """Query, key and value as one matrix, with the queries scaled by 1 / sqrt(width of a head)."""
        parts = {
            kind: [self.tensor(f"{prefix}{name}.{kind}") for name in ("query", "key", "value")]
            for kind in ("weight", "bias")
        }
        for kind in parts:
            parts[kind][0] *= 1 / math.sqrt(self._shape.hidden // self._shape.heads)
        return build_linear(torch.cat(parts["weight"]), torch.cat(parts["bias"]), int8=self._int8)


def _padded(length: int) -> int:
    return -(-length // _PADDING) * _PADDING


def _batches(order: Sequence[int], ids: Sequence[np.ndarray], rows: int) -> Iterator[Sequence[int]]:
    """Cut an order, longest texts first, into batches of at most ``rows`` padded tokens but at least one text."""
    start = 0
    while start < len(order):
        count = max(rows // _padded(len(ids[order[start]])), 1)
        yield order[start : start + count]
        start += count
