"""Ceilings that no method can move, and the speed-up that a method's own step times add up to.

A ceiling follows from the machine or the baseline only: the bytes of a pass at the measured bandwidth, or 1 + R/G of
sequential retrieval. A ratio above it is a measurement error. What a method's own steps allow is not a ceiling, since
a better method has other steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from specrag.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The least time of one pass.

    Args:
        read_seconds: time to read its bytes at the measured bandwidth.
        compute_seconds: time to do its operations at the measured rate.
    """

    read_seconds: float
    compute_seconds: float

    @property
    def seconds(self) -> float:
        """The larger of the two: reading and computing overlap."""
        return max(self.read_seconds, self.compute_seconds)

    @property
    def bound_by(self) -> str:
        """``reading`` or ``computing``."""
        return "reading" if self.read_seconds >= self.compute_seconds else "computing"


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """The sizes of a Llama-like decoder; ``kv_heads * head_dim`` is the width of one layer's keys."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def layer_weights(self) -> int:
        """Weights of the linear layers of all blocks."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        """Weights of the output layer."""
        return self.hidden * self.vocabulary


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one pass must do: bytes to read and operations to compute (a multiply-add counts two)."""

    read_bytes: float
    operations: float


def decoder_work(
    shape: DecoderShape,
    *,
    rows: int,
    context: int,
    weight_bytes: float,
    cache_bytes: float,
    output_rows: int | None = None,
) -> Work:
    """The work of one sequence's pass of ``rows`` new tokens behind ``context`` committed ones.

    Args:
        weight_bytes: bytes per weight (bf16: 2, int8: slightly more than 1).
        cache_bytes: bytes per number in the keys and values.
        output_rows: rows that need logits; None for all.
    """
    outputs = rows if output_rows is None else output_rows
    key_width = shape.kv_heads * shape.head_dim
    keys = context + rows
    read = weight_bytes * (shape.layer_weights + (shape.head_weights if outputs else 0))
    read += cache_bytes * 2 * shape.layers * key_width * keys
    linear = 2 * (rows * shape.layer_weights + outputs * shape.head_weights)
    attention = 4 * shape.layers * rows * keys * shape.heads * shape.head_dim
    return Work(read_bytes=read, operations=linear + attention)


def pass_floor(work: Work, *, read_gb_s: float, rate_gop_s: float) -> Floor:
    """The floor of a pass at the machine's measured bandwidth and rate (`machine.measure_rates`)."""
    _check_positive("read_gb_s", read_gb_s)
    _check_positive("rate_gop_s", rate_gop_s)
    return Floor(
        read_seconds=work.read_bytes / read_gb_s / 1e9, compute_seconds=work.operations / rate_gop_s / 1e9
    )


def steps_speedup(
    *, tokens_per_round: float, plain_seconds: float, verify_seconds: float, draft_seconds: float
) -> float:
    """The speed-up of token speculation whose rounds cost nothing but drafting and verification.

    Args:
        tokens_per_round: mean tokens that a round yields (MAT).
        plain_seconds: one pass of plain decoding, one row.
        verify_seconds: one pass over the draft.
        draft_seconds: making one draft.
    """
    _check_positive("tokens_per_round", tokens_per_round)
    _check_positive("plain_seconds", plain_seconds)
    _check_positive("verify_seconds", verify_seconds)
    if draft_seconds < 0:
        raise InputError("draft_seconds", draft_seconds, "give 0 or more")
    return tokens_per_round * plain_seconds / (verify_seconds + draft_seconds)


def retrieval_ceiling(*, retrieval_seconds: float, generation_seconds: float) -> float:
    """1 + R/G: the speed-up over sequential retrieval if all of its retrieval vanished (RaLMSpec, section 5.1).

    It holds for methods that make the same passes of the model as the baseline: generation cannot shrink.

    Args:
        retrieval_seconds, generation_seconds: R and G of the sequential baseline.
    """
    _check_positive("generation_seconds", generation_seconds)
    if retrieval_seconds < 0:
        raise InputError("retrieval_seconds", retrieval_seconds, "give 0 or more")
    return 1 + retrieval_seconds / generation_seconds


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise InputError(name, value, "give a number above 0")
