"""Borrows the caller's own module for one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from specrag.engine import LOGITS, Segment
from specrag.errors import InputError
from specrag.models import ATTENTION, LoadedModel, Tokenizer, TransformersModel
from specrag.models.catalog import ModelFiles

#: Prompt tokens on which a model is verified.
_VERIFIED_TOKENS = 16
#: Largest distance of its logits from the module's own, as a share of their spread; rounding is far below it.
_FP32_DISTANCE, _DISTANCE = 0.01, 0.1
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_REMEDY = "leave out custom_generate for this model"


class Borrowed:
    """A context in which a module uses our attention; afterwards the module is as it was.

    Args:
        module: the module.

    Attributes:
        model: computes passes with the module.
    """

    model: TransformersModel

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module

    def __enter__(self) -> Borrowed:
        self._training = [part for part in self._module.modules() if part.training]
        self._attention = _attention_of(self._module)
        try:
            self.model = TransformersModel(self._module)
            if self._module.config._attn_implementation != ATTENTION:
                raise self._refusal("its attention cannot be replaced")
        except Exception as error:
            self._give_back()
            if isinstance(error, InputError):
                raise
            raise self._refusal(repr(error)) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._give_back()

    def verify(self, prompt: Sequence[int]) -> None:
        """Compare a short pass with the module's own: an architecture may do things that the packed pass does not.

        Raises:
            InputError: the logits differ by more than rounding.
        """
        tokens = list(prompt[:_VERIFIED_TOKENS])
        try:
            found = self._packed_logits(tokens)
        except InputError:
            raise
        except Exception as error:
            raise self._refusal(f"a packed pass failed with {error!r}") from error
        self._module.set_attn_implementation(self._attention)
        try:
            ids = torch.tensor([tokens], device=self.model.device)
            expected = self._module(input_ids=ids, use_cache=False).logits[0, -1].float().cpu()
        finally:
            self._module.set_attn_implementation(ATTENTION)
        limit = _FP32_DISTANCE if self.model.dtype == torch.float32 else _DISTANCE
        same = found.shape == expected.shape
        if not same or not (found - expected).norm() <= limit * (expected - expected.mean()).norm():
            raise self._refusal("a packed pass gives other logits than the module's own")

    def loaded(self) -> LoadedModel:
        """The model in the form that methods check."""
        name = str(self._module.config._name_or_path)
        files = ModelFiles(name, Path(name), "unknown", name)
        tokenizer = cast("Tokenizer", _Vocabulary(files))
        dtype = _DTYPES.get(self.model.dtype, "bf16")
        return LoadedModel(name, files, self.model, tokenizer, dtype, str(self.model.device))

    def _packed_logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits ``[vocab_size]`` after the last token, which reads the others from the cache."""
        cache = self.model.new_cache()
        cache.reserve(len(tokens))
        *before, last = tokens
        if before:
            self.model.forward([Segment(cache, before, None, [LOGITS] * len(before))])
            cache.accept(range(len(before)))
        row = self.model.forward([Segment(cache, [last], None, [LOGITS])])[0][0]
        return torch.tensor(row.logits)

    def _give_back(self) -> None:
        self._module.set_attn_implementation(self._attention)
        for part in self._training:
            part.training = True

    def _refusal(self, reason: str) -> InputError:
        remedy = " ".join(f"{reason}; {_REMEDY}".split())
        return InputError("model", type(self._module).__name__, remedy)


class _Vocabulary:
    """The module's tokenizer, read only when a method compares vocabularies, as one with a draft model does."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if not (self._files.folder / "tokenizer.json").is_file():
            raise InputError(
                "model",
                self._files.name,
                "a draft model needs the target's tokenizer.json; load the target from a folder that holds it",
            )
        return Tokenizer(self._files)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return self._tokenizer.special_tokens

    @property
    def eos_tokens(self) -> frozenset[int]:
        return self._tokenizer.eos_tokens

    def encode(self, text: str, *, special: bool) -> list[int]:
        return self._tokenizer.encode(text, special=special)

    def token_bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token)


def _attention_of(module: PreTrainedModel) -> dict[str, Any]:
    """The attention of a module and its parts, in the form that ``set_attn_implementation`` takes."""
    config = module.config
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    return {"": config._attn_implementation} | {
        name: part._attn_implementation for name, part in parts.items() if part is not None
    }
