"""The network of an EAGLE head: one decoder layer that continues the target's features.

Li et al. 2024, "EAGLE", section 4.1 (the same network in EAGLE-2). A row reads the target's feature at a position
and the token that follows it, and estimates the feature at that token; the target's own output matrix is applied to the
estimate as it would be to the true feature. File format and conventions: ``eagle_files.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from specrag.engine import KeyValueCache, KeyValueShape, Outputs, Row, Segment
from specrag.engine.attention import AttentionPlan, has_loops
from specrag.errors import InputError, SpecragError
from specrag.models.decoder import LeanDecoder
from specrag.models.eagle_files import HeadFiles, head_folder, read_head
from specrag.models.linear import Linear, build_gated, build_linear
from specrag.models.logits import read_rows
from specrag.models.row_ops import Rotary, interleave, row_ops
from specrag.models.weights import read_weights

if TYPE_CHECKING:
    from specrag.models.catalog import ModelFiles
    from specrag.models.loading import LoadedModel

_ATTENTION, _MLP = "layers.0.self_attn.", "layers.0.mlp."


class EagleHead:
    """A :class:`~specrag.engine.passes.SessionModel` whose segments carry a feature along with each token.

    Its rows have the same outputs as the target's: ``final`` is the estimated feature, everything else is computed from
    its logits. It computes in the target's dtype on the target's device and shares its embedding and output matrix.

    Args:
        files: the head.
        target: the model that it drafts for.
        output: the rows of the target's output matrix for ``files.vocabulary``, ``[n, hidden_size]``; all other tokens
            then have probability 0. ``None`` uses the whole matrix.
    """

    def __init__(self, files: HeadFiles, target: LeanDecoder, output: torch.Tensor | None = None) -> None:
        config = files.config
        self._target = target
        self.device, self.dtype = target.device, target.dtype
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._group = self._heads // self._kv_heads
        self._head_dim = config.head_dim
        self._size, self._eps = config.hidden_size, config.rms_norm_eps
        weights = {
            name: tensor.to(device=self.device, dtype=self.dtype) for name, tensor in files.weights.items()
        }
        self._fuse = build_linear(weights["fc.weight"], weights.get("fc.bias"))
        self._qkv = self._projections(weights)
        self._mix = build_linear(weights[f"{_ATTENTION}o_proj.weight"], None)
        self._norm = weights["layers.0.post_attention_layernorm.weight"].clone()
        gate_up = torch.cat([weights[f"{_MLP}gate_proj.weight"], weights[f"{_MLP}up_proj.weight"]])
        self._down = build_linear(weights[f"{_MLP}down_proj.weight"], None)
        rope = SimpleNamespace(rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta})
        self._rotary = Rotary(rope, self._head_dim, self.device)
        self._ops = row_ops(self.dtype, self.device)
        self._gated = build_gated(gate_up, None, self._ops)
        self._factors = torch.ones(self._heads + self._kv_heads, device=self.device)
        self._factors[: self._heads] = self._head_dim**-0.5
        self._shape = KeyValueShape(1, self._kv_heads, self._head_dim, self.dtype, self.device)
        self._reduced: _ReducedOutput | None = None
        if files.vocabulary is not None and output is not None:
            matrix = output.to(device=self.device, dtype=self.dtype)
            self._reduced = _ReducedOutput(files.vocabulary, matrix, target.vocab_size)

    @property
    def vocab_size(self) -> int:
        return self._target.vocab_size

    @property
    def context_length(self) -> int:
        # Rotary positions are unlimited; the head was trained on shorter texts, but that is no limit.
        return self._target.context_length

    def new_cache(self) -> KeyValueCache:
        return KeyValueCache(self._shape)

    def keep(self, feature: torch.Tensor) -> torch.Tensor:
        """A copy of one row's feature, ``[hidden_size]``, that does not keep its whole pass in memory."""
        return feature.clone()

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> list[list[Row]]:
        plan = AttentionPlan(segments, self._group, compiled=has_loops(self._shape))
        wanted = [outputs for segment in segments for outputs in segment.outputs]
        tokens = torch.tensor([token for segment in segments for token in segment.tokens], device=self.device)
        embedded = F.embedding(tokens, self._target.embedding).to(self.dtype)
        x = self._fuse(torch.cat([embedded, self._features(segments)], dim=-1))
        x = self._attention(x, plan)
        y = self._ops.norm(x, self._norm, self._eps)
        x = self._down(self._gated(y), x)
        rows = iter(self._answer(wanted, x))
        return [[next(rows) for _ in segment.tokens] for segment in segments]

    def _features(self, segments: Sequence[Segment]) -> torch.Tensor:
        features: list[torch.Tensor] = []
        for segment in segments:
            if segment.features is None or len(segment.features) != len(segment.tokens):
                count = "none" if segment.features is None else len(segment.features)
                raise SpecragError(
                    f"features: {count} for {len(segment.tokens)} rows of a head: give one each"
                )
            features += segment.features
        return torch.stack(features)

    def _attention(self, x: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        turned = self._heads + self._kv_heads
        heads = self._qkv(x).unflatten(-1, (-1, self._head_dim))  # [rows, heads + 2 * kv_heads, head_dim]
        rotation = self._ops.rotation(self._rotary.turns(plan.positions), self._factors)
        queries_keys = self._ops.rotate(heads[:, :turned], rotation)
        plan.write(0, queries_keys[:, self._heads :], heads[:, turned:])
        mixed = plan.attend_rows(0, queries_keys[:, : self._heads])
        return self._mix(mixed, x)

    def _projections(self, weights: dict[str, torch.Tensor]) -> Linear:
        """The query, key and value projections in one matrix, reordered for :mod:`specrag.models.row_ops`."""
        parts: dict[str, list[torch.Tensor]] = {"weight": [], "bias": []}
        for name, heads in (("q", self._heads), ("k", self._kv_heads), ("v", 0)):
            for kind, found in parts.items():
                tensor = weights.get(f"{_ATTENTION}{name}_proj.{kind}")
                if tensor is not None:
                    found.append(interleave(tensor, heads, self._head_dim) if heads else tensor)
        bias = torch.cat(parts["bias"]) if parts["bias"] else None
        return build_linear(torch.cat(parts["weight"]), bias)

    # -- from features to outputs ---------------------------------------------------------------------------

    def _answer(self, wanted: Sequence[Outputs], features: torch.Tensor) -> list[Row]:
        if any(name != "final" for outputs in wanted for name in outputs.hidden):
            raise InputError("hidden", [outputs.hidden for outputs in wanted], "a head has 'final' alone")
        if self._reduced is None:
            return read_rows(wanted, {"final": features}, self._target.logits)
        if any(outputs.logits or outputs.log_probs_of for outputs in wanted):
            return read_rows(wanted, {"final": features}, self._reduced.scattered)
        rows = read_rows(wanted, {"final": features}, self._reduced.output)
        for row in rows:
            self._reduced.name_tokens(row)
        return rows


class _ReducedOutput:
    """Some rows of an output matrix.

    Args:
        tokens: int64 ``[n]``, ascending: the tokens of the rows.
        matrix: the rows, ``[n, hidden_size]``.
        vocab_size: number of rows of the whole matrix.
    """

    def __init__(self, tokens: torch.Tensor, matrix: torch.Tensor, vocab_size: int) -> None:
        self.output = build_linear(matrix, None)
        self._tokens = tokens.to(matrix.device)
        self._names = tokens.numpy()
        self._vocab_size = vocab_size

    def scattered(self, features: torch.Tensor) -> torch.Tensor:
        """Logits of all tokens, ``[rows, vocab_size]``, -inf for those left out."""
        logits = features.new_full((features.shape[0], self._vocab_size), float("-inf"))
        logits[:, self._tokens] = self.output(features)
        return logits

    def name_tokens(self, row: Row) -> None:
        """Replace row indexes by tokens; these ascend, so a tie still goes to the smaller token."""
        if row.argmax is not None:
            row.argmax = int(self._names[row.argmax])
        if row.top_tokens is not None:
            row.top_tokens = self._names[row.top_tokens]


def load_head(name: str, target: LoadedModel) -> EagleHead:
    """Load a head for a target.

    The rows of a reduced vocabulary come from the target's files, without an adapter that was merged into the model.

    Args:
        name: as for :func:`~specrag.models.eagle_files.head_folder`.
        target: the model that it drafts for.

    Raises:
        InputError: there is no such head, or it is for another model.
        ModelFilesError: the head's files are missing or damaged.
    """
    model = target.model
    if not isinstance(model, LeanDecoder):
        raise InputError(
            "drafter",
            f"eagle:{name}",
            f"heads draft for Llama, Qwen and Mistral models, {target.name} is none",
        )
    files = read_head(head_folder(name), model.embedding)
    output = None if files.vocabulary is None else _output_rows(target.files, files.vocabulary)
    return EagleHead(files, model, output)


def _output_rows(files: ModelFiles, tokens: torch.Tensor) -> torch.Tensor:
    weights = read_weights(files)
    matrix = weights.get("lm_head.weight")
    return (weights["model.embed_tokens.weight"] if matrix is None else matrix)[tokens]
