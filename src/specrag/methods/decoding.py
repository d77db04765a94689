"""Methods that decode tokens: alone, or in place of plain decoding within another method."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING

from specrag.checks import did_you_mean
from specrag.errors import InputError, SpecragError
from specrag.methods.base import GUESSES, Decoder, EncodesPrompts, Method, Needs, Plan
from specrag.methods.registry import (
    DEFAULT_OVER_CONTEXT,
    DEFAULT_OVER_PASSAGES,
    method_class,
    method_names,
)
from specrag.request import DEFAULT_MAX_TOKENS, Options, Prompt, Request

if TYPE_CHECKING:
    from specrag.methods.resources import Resources

#: Needs of methods that decode by themselves, with their default settings.
_DECODING = (Needs.SESSIONS, Needs.GENERATOR)


class DecodingMethod(Method):
    """A method that decodes tokens.

    Over a knowledge base it decodes standard RAG's answer, over a long context the answer of a model that reads all
    of it.
    """

    needs = Needs.SESSIONS

    @abstractmethod
    def decoder(self, given: Resources) -> Decoder:
        """How tokens are decoded; equal options share one decoder, so that it learns what a pass costs.

        Raises:
            InputError: an option names something that is not available.
        """

    def plan(self, request: Request, given: Resources) -> Plan:
        """See :class:`~specrag.methods.base.Method`."""
        decoder = self.decoder(given)
        if given.retriever is not None or request.passages is not None:
            return method_class(DEFAULT_OVER_PASSAGES)(decoding=decoder).plan(request, given)
        if request.documents:
            return method_class(DEFAULT_OVER_CONTEXT)(decoding=decoder).plan(request, given)
        return plan_text(request, given, decoder)


class OwnDecoder(DecodingMethod):
    """The caller's own decoder in place of a method's.

    Args:
        decoder: how tokens are decoded.
    """

    name = "own"
    summary = "A decoder of the caller's own"

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self._decoder = decoder

    def decoder(self, given: Resources) -> Decoder:
        """The caller's."""
        del given
        return self._decoder


def plan_text(request: Request, given: Resources, decoder: Decoder) -> Plan:
    """The plan of a text without passages.

    Raises:
        InputError: a value cannot be used.
        ContextLengthError: the prompt does not fit.
    """
    llm, raw = given.generator, request.options.get("raw", False)
    tokens = llm.encode(request.prompt, raw=raw) if isinstance(llm, EncodesPrompts) else []
    prompt: Prompt = tokens or request.prompt
    size = len(tokens) or llm.count(prompt, raw=raw)
    left = max(llm.context_length - size, 1)
    most = min(request.options.get("max_tokens", DEFAULT_MAX_TOKENS), left)
    options: Options = {**request.options, "method": decoder, "max_tokens": most}
    # Checked now, while the caller can still be told before any work.
    llm.generating(prompt, options).close()
    return Plan(lambda: llm.generating(prompt, options), size + most + GUESSES, tuple(tokens))


def make_decoder(name: str, given: Resources, field: str = "decoder") -> Decoder:
    """The decoder of a method's default settings.

    Raises:
        InputError: there is no such method, or it does not decode tokens by itself.
    """
    made = method_class(name)() if name in method_names() else None
    if not isinstance(made, DecodingMethod) or made.needs not in _DECODING:
        known = decoder_names()
        raise InputError(field, name, f"{did_you_mean(name, known)}take one of {', '.join(known)}")
    return made.decoder(given)


def decoder_names() -> list[str]:
    """The methods that decode tokens with their default settings, for options that name one."""
    names = []
    for name in method_names():
        with suppress(SpecragError):  # a method of another package that cannot be imported
            made = method_class(name)
            if issubclass(made, DecodingMethod) and made.needs in _DECODING:
                names.append(name)
    return names
