"""Checks whether a call of ``model.generate`` can be decoded; anything else is refused before any work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import (
    GenerationMode,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from specrag.errors import InputError

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_RECORDS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
#: Their state depends on the order of their calls, not on the tokens; a draft tree has no such order.
_ORDERED = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
#: Inputs that transformers itself gives to every decoding.
_USUAL_INPUTS = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep")


def check_options(
    model: PreTrainedModel,
    config: GenerationConfig,
    processors: LogitsProcessorList,
    assistant: object,
    synced_gpus: bool,
) -> None:
    """Check the kind of model and what the call requests.

    Raises:
        InputError: it is not supported.
    """
    _check_model(model)
    if synced_gpus:
        raise InputError("synced_gpus", True, "run it in one process, or give no custom_generate")
    if max(config.num_beams or 1, config.num_beam_groups or 1) > 1:
        raise InputError("num_beams", config.num_beams, "give 1; beams are not speculated")
    mode = config.get_generation_mode(assistant)
    if mode not in _MODES:
        raise InputError(
            "generation mode",
            str(mode.value),
            "leave out the options that ask for it; greedy search and sampling are speculated",
        )
    if config.return_dict_in_generate:
        for option in _RECORDS:
            if getattr(config, option):
                raise InputError(option, True, "leave it out; only the sequences are returned")
    for processor in processors:
        if isinstance(processor, _ORDERED):
            raise InputError(
                "logits processor", type(processor).__name__, "leave it out; it must be called in order"
            )


def _check_model(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise InputError(
            "model", name, "it is an encoder-decoder; give a decoder-only model, or no custom_generate"
        )
    if model._is_stateful:
        raise InputError(
            "model",
            name,
            "its state cannot be taken back; give a model with attention, or no custom_generate",
        )
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise InputError(
            "model", name, "it lies on several devices; load it onto one, or give no custom_generate"
        )


def prompts_of(input_ids: torch.Tensor, inputs: Mapping[str, Any]) -> list[list[int]]:
    """The tokens of each row, without the padding in front.

    Args:
        input_ids: ``[rows, length]``.
        inputs: the other inputs of the model.

    Raises:
        InputError: a prompt is empty or padded elsewhere, or there is an input that cannot be used.
    """
    rows, length = input_ids.shape
    _check_inputs(inputs)
    mask = inputs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    if tuple(mask.shape) != (rows, length):
        raise InputError("attention_mask", tuple(mask.shape), f"give one of shape {(rows, length)}")
    if not length or not bool((mask[:, -1] == 1).all()):
        remedy = "give prompts of at least one token, and pad on the left (padding_side='left')"
        raise InputError("attention_mask", "no token at the end of a row", remedy)
    if bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise InputError("attention_mask", "gaps", "mask nothing but padding on the left")
    positions = inputs.get("position_ids")
    expected = (mask.long().cumsum(-1) - 1).clamp_min(0)
    if positions is not None and not torch.equal(
        positions.to(expected).expand_as(expected) * mask, expected * mask
    ):
        raise InputError("position_ids", "positions of your own", "leave them out; they count the tokens")
    return [row[kept.bool()].tolist() for row, kept in zip(input_ids, mask, strict=True)]


def _check_inputs(inputs: Mapping[str, Any]) -> None:
    for name, value in inputs.items():
        zeros = name.endswith("token_type_ids") and value is not None and not bool(value.any())
        if value is not None and name not in _USUAL_INPUTS and not zeros:
            raise InputError(name, type(value).__name__, "leave it out; text is read from input_ids only")
    # transformers makes an empty cache for every call and marks one that the caller gives.
    cache = inputs.get("past_key_values")
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length()):
        raise InputError(
            "past_key_values",
            type(cache).__name__,
            "leave it out; prompts are read whole, into keys and values of the call's own",
        )
