"""Language models: names and files, weights, tokenizers, adapters, networks, and endpoints."""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.models.adapters import (
        ADAPTER_CONFIG,
        ADAPTER_WEIGHTS,
        DRAFTER_RECORD,
        check_adapter,
        drafter_form,
        find_adapter,
        shipped_adapters,
    )
    from specrag.models.chat import END_TOKENS
    from specrag.models.decoder import LeanDecoder
    from specrag.models.eagle_files import CONFIG, TOKENS, VOCABULARY, WEIGHTS, HeadConfig, shipped_heads
    from specrag.models.eagle_head import EagleHead, load_head
    from specrag.models.grammar import JSON_FORM, Grammar, GrammarVocabulary
    from specrag.models.linear import Linear, PackedLinear, build_linear
    from specrag.models.loading import (
        DTYPES,
        LoadedModel,
        build_module,
        default_dtype,
        default_invariance,
        find_device,
        is_lean,
        load_model,
    )
    from specrag.models.roles import (
        AnswerFormat,
        GeneratedText,
        PartScore,
        Reluctance,
        ScoredText,
        ScoringRequest,
        TextDelta,
        TextDone,
        TextGenerator,
        TextPart,
        TextPrompt,
        TextRequest,
        TextScorer,
        TextToken,
        assign,
    )
    from specrag.models.scoring import LocalScorer
    from specrag.models.tokenizer import TextStream, Tokenizer, encode_text
    from specrag.models.transformers import ATTENTION, TransformersModel
    from specrag.models.weights import read_config, read_config_json, read_weights, weight_files
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "ADAPTER_CONFIG",
    "ADAPTER_WEIGHTS",
    "ATTENTION",
    "CONFIG",
    "DRAFTER_RECORD",
    "DTYPES",
    "END_TOKENS",
    "JSON_FORM",
    "TOKENS",
    "VOCABULARY",
    "WEIGHTS",
    "AnswerFormat",
    "EagleHead",
    "GeneratedText",
    "Grammar",
    "GrammarVocabulary",
    "HeadConfig",
    "LeanDecoder",
    "Linear",
    "LoadedModel",
    "LocalScorer",
    "PackedLinear",
    "PartScore",
    "Reluctance",
    "ScoredText",
    "ScoringRequest",
    "TextDelta",
    "TextDone",
    "TextGenerator",
    "TextPart",
    "TextPrompt",
    "TextRequest",
    "TextScorer",
    "TextStream",
    "TextToken",
    "Tokenizer",
    "TransformersModel",
    "assign",
    "build_linear",
    "build_module",
    "check_adapter",
    "default_dtype",
    "default_invariance",
    "drafter_form",
    "encode_text",
    "find_adapter",
    "find_device",
    "is_lean",
    "load_head",
    "load_model",
    "read_config",
    "read_config_json",
    "read_weights",
    "shipped_adapters",
    "shipped_heads",
    "weight_files",
]
