"""The methods, a file or a folder each, and what they share."""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.methods.adaptive import Adaptive
    from specrag.methods.base import (
        Decoder,
        Generator,
        LocalModel,
        Method,
        MethodOptions,
        Needs,
        Plan,
        PromptNeeds,
        read_prompt,
    )
    from specrag.methods.block_files import ReadReport, read_passages
    from specrag.methods.decoding import DecodingMethod, decoder_names, make_decoder
    from specrag.methods.describe import default_words, describe_method, describe_options
    from specrag.methods.drafters import NamedDrafter
    from specrag.methods.events import tap_steps
    from specrag.methods.facade import Call, Facade
    from specrag.methods.generator import LocalGenerator
    from specrag.methods.partial import mark_missing_shards, missing_since
    from specrag.methods.plain import Plain
    from specrag.methods.prompts import FEWEST_WORDS, cut_passage, most_that_fit
    from specrag.methods.registry import (
        DEFAULT_METHOD,
        DEFAULT_OVER_CONTEXT,
        DEFAULT_OVER_PASSAGES,
        check_values,
        make_method,
        method_class,
        method_names,
    )
    from specrag.methods.remote import Relayed, RemoteModel
    from specrag.methods.resources import NO_ADAPTER, Resources, SharedMethods
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "DEFAULT_METHOD",
    "DEFAULT_OVER_CONTEXT",
    "DEFAULT_OVER_PASSAGES",
    "FEWEST_WORDS",
    "NO_ADAPTER",
    "Adaptive",
    "Call",
    "Decoder",
    "DecodingMethod",
    "Facade",
    "Generator",
    "LocalGenerator",
    "LocalModel",
    "Method",
    "MethodOptions",
    "NamedDrafter",
    "Needs",
    "Plain",
    "Plan",
    "PromptNeeds",
    "ReadReport",
    "Relayed",
    "RemoteModel",
    "Resources",
    "SharedMethods",
    "check_values",
    "cut_passage",
    "decoder_names",
    "default_words",
    "describe_method",
    "describe_options",
    "make_decoder",
    "make_method",
    "mark_missing_shards",
    "method_class",
    "method_names",
    "missing_since",
    "most_that_fit",
    "read_passages",
    "read_prompt",
    "tap_steps",
]
