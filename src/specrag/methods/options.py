"""What a caller may ask of a generation, and the check that comes before any work."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypedDict

from specrag.engine.processors import LogitsProcessor
from specrag.engine.sampling import SamplingParams
from specrag.engine.stopping import StopConditions
from specrag.errors import InputError
from specrag.methods.base import DecodingMethod
from specrag.methods.registry import check_method

#: Most alternatives that ``log_probs`` may ask for.
MAX_ALTERNATIVES = 20

DEFAULT_MAX_TOKENS = 256


class Options(TypedDict, total=False):
    """Keyword arguments of every generating call.

    Args:
        max_tokens: at most this many tokens (default 256).
        temperature: 0, the default, takes the most probable token every time.
        top_k: draw among this many tokens; 0, the default, among all.
        top_p: draw among the most probable tokens that together have this probability (default 1).
        min_p: leave out tokens less probable than this share of the most probable one (default 0).
        repetition_penalty: above 1 makes tokens of prompt and output less probable.
        presence_penalty: subtracted from the logits of tokens that the output holds.
        frequency_penalty: subtracted once for each time that the output holds a token.
        logit_bias: added to the logits of these tokens; ``-inf`` forbids one.
        seed: the same seed gives the same text (default 0).
        stop: a string or several; the text ends before the first of them.
        log_probs: report log-probabilities, with this many alternatives (0 for none).
        processors: logits processors of your own, after the built-in ones.
        raw: take a text as it is; by default it is put into the model's chat template if there is one.
        ignore_eos: do not end at the model's end tokens (for measuring).
        method: how to decode: a name (default ``plain``) or a configured method.
        references: texts that the output may quote, such as retrieved passages, also those that the prompt
            does not hold; methods that copy guesses from texts use them.
        tenant: whose prefix cache to use.
        timeout: seconds after which the request ends with an error.
    """

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: str | Sequence[str]
    log_probs: int
    processors: Sequence[LogitsProcessor]
    raw: bool
    ignore_eos: bool
    method: str | DecodingMethod
    references: Sequence[str]
    tenant: str
    timeout: float


@dataclass(frozen=True, slots=True)
class CheckedOptions:
    """:class:`Options` with their defaults, every value checked.

    Attributes:
        stop: without the model's end tokens, which are not known yet.
    """

    method: str | DecodingMethod
    sampling: SamplingParams
    stop: StopConditions
    log_probs: int | None
    processors: Sequence[LogitsProcessor]
    raw: bool
    ignore_eos: bool
    references: tuple[str, ...]
    tenant: str
    timeout: float | None


_SAMPLING = tuple(field.name for field in fields(SamplingParams))


def check_options(options: Options) -> CheckedOptions:
    """Check every value; needs no model.

    Raises:
        InputError: an option is unknown or its value cannot be used.
    """
    unknown = set(options) - set(Options.__annotations__)
    if unknown:
        name = min(unknown)
        near = difflib.get_close_matches(name, Options.__annotations__, n=1)
        known = f"did you mean {near[0]}?" if near else f"take one of {', '.join(Options.__annotations__)}"
        raise InputError("option", name, known)
    return CheckedOptions(
        method=_method(options.get("method", "plain")),
        sampling=SamplingParams(**{name: options[name] for name in _SAMPLING if name in options}),  # type: ignore[literal-required]
        stop=_stop_conditions(options),
        log_probs=_log_probs(options.get("log_probs")),
        processors=options.get("processors", ()),
        raw=options.get("raw", False),
        ignore_eos=options.get("ignore_eos", False),
        references=_references(options.get("references", ())),
        tenant=options.get("tenant", ""),
        timeout=_timeout(options.get("timeout")),
    )


def _method(value: str | DecodingMethod) -> str | DecodingMethod:
    if isinstance(value, str):
        check_method(value)
    elif not callable(getattr(value, "decode", None)):
        raise InputError("method", value, "give a method's name or a configured method")
    return value


def _references(value: Sequence[str]) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(text, str) for text in value):
        raise InputError("references", value, "give a list of texts")
    return tuple(value)


def _stop_conditions(options: Options) -> StopConditions:
    stop = options.get("stop", ())
    strings = (stop,) if isinstance(stop, str) else stop
    try:
        return StopConditions(options.get("max_tokens", DEFAULT_MAX_TOKENS), frozenset(), strings)  # type: ignore[arg-type]
    except InputError as error:
        if error.field == "stop_strings":  # callers know it as ``stop``
            raise InputError("stop", error.value, error.remedy) from None
        raise


def _log_probs(value: int | None) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_ALTERNATIVES:
        raise InputError("log_probs", value, f"give an integer from 0 to {MAX_ALTERNATIVES}")
    return value


def _timeout(value: float | None) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InputError("timeout", value, "give seconds, more than 0")
    return float(value)
