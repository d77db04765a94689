"""The published figure: one frozen object and one JSON line per measurement.

The field names are a public format (``specrag bench SUITE --json FILE``): consumers rely on every field being
present and on ``null`` where it does not apply.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from specrag.errors import InputError
from specrag.methods import method_names

PEERS = frozenset({"transformers", "transformers-lookup", "transformers-assisted", "vllm"})
"""Other systems that our methods are compared with."""

FORMER = frozenset({"rag", "sequential-kv-reuse"})
"""Labels of former methods that are now options of others: ``long-context -o read=part`` and ``sequential``."""

DTYPES = frozenset({"fp32", "bf16", "fp16", "int8"})
"""How the model holds its weights; ``int8`` is 8-bit weights and activations in the linear layers."""

CEILING = "ceiling"
"""The extra that no speed-up can exceed, whatever the method (see `specrag.bench.bounds`)."""

OVERALL = "overall"
"""The ``task`` of a summary over tasks."""

Extra = bool | int | float | str | None
"""A value of ``Measurement.extra``."""

_VARIANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]*")
_FIGURES = (
    "speedup",
    "speedup_low",
    "speedup_high",
    "tokens_per_second",
    "mat",
    "acceptance",
    "identical",
    "accuracy",
)
_SHARES = ("acceptance", "identical", "accuracy")
_REQUIRED_TEXT = ("suite", "task", "method", "device", "command", "version", "date")


def check_method(name: str, field_name: str = "method") -> str:
    """Return ``name`` if it is a known method with well-formed variants (``ralmspec+PSA``).

    Raises:
        InputError: naming the methods that exist.
    """
    base, *variants = name.split("+")
    known = {*method_names(), *PEERS, *FORMER}
    if base not in known:
        raise InputError(field_name, name, f"start with one of {', '.join(sorted(known))}")
    if not all(_VARIANT.fullmatch(variant) for variant in variants):
        raise InputError(field_name, name, "write variants after a plus sign, as in ralmspec+PSA")
    return name


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One published figure; ``None`` where a field does not apply.

    Args:
        suite, task: what was measured; ``task`` is ``overall`` in the summary over tasks.
        method, baseline: methods or `PEERS`, with variants after a plus sign.
        model: the target model's name.
        dtype: how the target holds its weights, one of `DTYPES`.
        device: torch's name, ``cpu`` or ``cuda``; the page names the hardware.
        n: rows (prompts, questions) that the figure is based on.
        speedup, speedup_low, speedup_high: baseline seconds / method seconds, with its 95 % interval.
        tokens_per_second: output tokens per second of ``method``.
        mat: mean accepted tokens per pass of the target.
        acceptance: accepted / drafted tokens, 0 to 1.
        acceptance_by_source: the same by source (``suffix``, ``recycling``), if known.
        identical: share of outputs equal to the baseline's, 0 to 1.
        accuracy: share of right answers, 0 to 1.
        simulated: true if any part of the figure is modelled instead of measured.
        command: the command that repeats the measurement.
        version: version of the code, `specrag.bench.runner.code_version`.
        date: ISO date, UTC.
        extra: figures that only this suite knows; the unit is part of the name (``peak_mib``).

    Raises:
        InputError: an unknown method, baseline or dtype, a share outside 0 to 1, a figure that is not finite,
            or an interval that does not contain its value.
    """

    suite: str
    task: str
    method: str
    device: str
    n: int
    command: str
    version: str
    date: str
    baseline: str | None = None
    model: str | None = None
    dtype: str | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    tokens_per_second: float | None = None
    mat: float | None = None
    acceptance: float | None = None
    acceptance_by_source: Mapping[str, float] | None = None
    identical: float | None = None
    accuracy: float | None = None
    simulated: bool = False
    extra: Mapping[str, Extra] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "extra", MappingProxyType(dict(self.extra)))
        for name in _REQUIRED_TEXT:
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise InputError(name, value, "give a text that is not empty")
        check_method(self.method)
        if self.baseline is not None:
            check_method(self.baseline, "baseline")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InputError("dtype", self.dtype, f"use one of {', '.join(sorted(DTYPES))}")
        if self.n < 0:
            raise InputError("n", self.n, "give the number of rows, 0 or more")
        self._check_figures()
        self._check_extra()
        self._check_interval()

    def _check_figures(self) -> None:
        for name in _FIGURES:
            value = getattr(self, name)
            if value is None:
                continue
            if not math.isfinite(value) or value < 0:
                raise InputError(name, value, "give a finite number, 0 or more, or None")
            if name in _SHARES and value > 1:
                raise InputError(name, value, "give a share from 0 to 1")
        for source, share in (self.acceptance_by_source or {}).items():
            if not 0 <= share <= 1:
                raise InputError(f"acceptance_by_source.{source}", share, "give a share from 0 to 1")

    def _check_extra(self) -> None:
        for key, figure in self.extra.items():
            if not isinstance(figure, Extra):
                raise InputError(f"extra.{key}", figure, "give a number, a text, a truth value or None")
            if isinstance(figure, float) and not math.isfinite(figure):
                raise InputError(f"extra.{key}", figure, "give a finite number or None")

    def _check_interval(self) -> None:
        ends = (self.speedup_low, self.speedup, self.speedup_high)
        if self.speedup is None and any(end is not None for end in ends):
            raise InputError("speedup", self.speedup, "give the speed-up together with its interval")
        known = [end for end in ends if end is not None]
        if known != sorted(known):
            raise InputError("speedup", self.speedup, "give an interval that contains the speed-up")

    @property
    def ceiling(self) -> float | None:
        """The largest speed-up that physics allows; None if unknown."""
        found = self.extra.get(CEILING)
        return float(found) if isinstance(found, int | float) else None

    @property
    def above_ceiling(self) -> bool:
        """True if the speed-up is more than physics allows: a measurement error."""
        return self.speedup is not None and self.ceiling is not None and self.speedup > self.ceiling

    def to_json(self) -> str:
        """One line of JSON with every field, ``extra`` last."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        values["extra"] = dict(self.extra)
        return json.dumps(values, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Measurement:
        """Read what `to_json` wrote.

        Raises:
            InputError: the line is not a JSON object or lacks a field.
        """
        try:
            return cls(**json.loads(line))
        except (TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError("measurement", line, "give one JSON object with the published fields") from error


def to_json_lines(measurements: Sequence[Measurement]) -> str:
    """All measurements as JSON lines, with a final newline."""
    return "".join(f"{measurement.to_json()}\n" for measurement in measurements)


def from_json_lines(text: str) -> list[Measurement]:
    """Read what `to_json_lines` wrote; empty lines are skipped."""
    return [Measurement.from_json(line) for line in text.split("\n") if line.strip()]
