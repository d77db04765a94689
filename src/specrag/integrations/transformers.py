"""Speculation inside ``model.generate`` of transformers, with the caller's own model.

transformers prepares every decoding as usual (generation config, logits processors, stopping criteria, padding) and
then calls the object that :func:`speculate` makes, instead of its own token loop.
"""

from __future__ import annotations

import inspect
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput

from specrag.engine import (
    Coroutine,
    Executor,
    SamplingParams,
    Session,
    SessionModel,
    StopConditions,
    check_room,
    gather,
)
from specrag.errors import InputError
from specrag.integrations.transformers_checks import check_options, prompts_of
from specrag.integrations.transformers_model import Borrowed
from specrag.integrations.transformers_rows import RowCriteria, RowOutput, RowProcessors, Rows
from specrag.methods import Decoder, DecodingMethod, Resources, make_decoder, read_prompt
from specrag.request import Usage
from specrag.speculation import TARGET, Settings, Step

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


def speculate(method: str | DecodingMethod | Decoder = "adaptive") -> Speculate:
    """Make the object to pass to ``model.generate`` as ``custom_generate``.

    Args:
        method: the name of a method that decodes tokens, or a configured one such as ``ReSpec(relaxed=True)``.

    Raises:
        InputError: there is no such method.

    Example:
        ``model.generate(**inputs, custom_generate=speculate("adaptive"), max_new_tokens=100)``
    """
    if isinstance(method, str):
        return Speculate(make_decoder(method, Resources(), "method"))
    if isinstance(method, DecodingMethod):
        return Speculate(method.decoder(Resources()))
    if not callable(getattr(method, "decode", None)):
        raise InputError("method", method, "give a method's name or a configured method")
    return Speculate(method)


@dataclass(frozen=True)
class _Call:
    """One checked call."""

    prompts: list[list[int]]
    settings: list[Settings]
    rows: Rows


class Speculate:
    """A decoding loop for ``model.generate(custom_generate=...)``. Made by :func:`speculate`.

    Keep the object and pass it to every call: it learns what passes cost, and it checks a model only once. Calls from
    several threads wait for one another, since a call replaces the model's attention.

    Args:
        method: how to decode.

    Attributes:
        usage: counts of the latest call, over all rows; ``None`` before the first.
    """

    def __init__(self, method: Decoder) -> None:
        self.method = method
        self.usage: Usage | None = None
        self._checked: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
        self._lock = threading.Lock()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Decode; called by ``model.generate``.

        Returns:
            ``[rows, length]`` prompts and outputs, padded on the right, as ``generate`` returns them.

        Raises:
            InputError: before any work, if the model, an option or an input cannot be used.
        """
        # transformers 5.23 passes neither the streamer nor the assistant to a callable. If the streamer were not found,
        # its reader would wait forever.
        given = _arguments_of_generate()
        streamer = streamer if streamer is not None else given.get("streamer")
        check_options(model, generation_config, logits_processor, given.get("assistant_model"), synced_gpus)
        prompts = prompts_of(input_ids, model_kwargs)
        pad = generation_config._pad_token_tensor
        if pad is None and len(prompts) > 1:
            raise InputError("pad_token_id", None, "set it in the generation config to decode a batch")
        rows = Rows(len(prompts), 0 if pad is None else int(pad), streamer)
        settings = _settings(input_ids, prompts, logits_processor, stopping_criteria, generation_config)
        with self._lock:
            self._run(model, _Call(prompts, settings, rows))
        if streamer is not None:
            streamer.end()
        sequences = torch.cat([input_ids, rows.padded().to(input_ids)], dim=1)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    def _run(self, module: PreTrainedModel, call: _Call) -> None:
        with Borrowed(module) as borrowed:
            if module not in self._checked:
                borrowed.verify(call.prompts[0])
                self.method.check(borrowed.loaded())
                self._checked.add(module)
            model = borrowed.model
            for prompt in call.prompts:
                check_room(model, len(prompt))
            outputs = call.rows.outputs()
            parts = zip(call.prompts, call.settings, outputs, strict=True)
            executor = Executor()
            try:
                together = gather([self._decode(model, *part) for part in parts])
                steps = list(executor.stream(executor.submit(together)))
            finally:
                executor.close()
        self.usage = _sum_up(call.prompts, steps)

    def _decode(
        self, model: SessionModel, prompt: Sequence[int], settings: Settings, output: RowOutput
    ) -> Coroutine[None]:
        session = Session(model)
        try:
            rows = yield from read_prompt(session, prompt, self.method.prompt_needs)
            yield from self.method.decode(session, settings, output, time.perf_counter, rows)
        finally:
            session.close()


def _settings(
    input_ids: torch.Tensor,
    prompts: Sequence[Sequence[int]],
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
) -> list[Settings]:
    """The settings of each row: processors and criteria are transformers' own, the draws are keyed."""
    count = len(prompts)
    # From torch's generator, so that a seed set there makes the text repeatable; one per row, so that rows with
    # the same prompt differ.
    seeds = torch.randint(2**62, (count,)).tolist() if config.do_sample else [0] * count
    room = (criteria.max_length or sys.maxsize) - input_ids.shape[1]
    settings = []
    for row, prompt in enumerate(prompts):
        padding = input_ids.shape[1] - len(prompt)
        settings.append(
            Settings(
                StopConditions(max(room, 1)),
                # The warpers are among the processors.
                SamplingParams(temperature=1.0 if config.do_sample else 0.0, seed=seeds[row]),
                processors=[RowProcessors(processors, input_ids[row], row, count)] if processors else (),
                until=RowCriteria(criteria, input_ids[row], padding, row, count),
            )
        )
    return settings


def _arguments_of_generate() -> Mapping[str, Any]:
    """The local variables of the ``generate`` that called us; empty if something else did."""
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    for _ in range(3):  # this function, __call__, and what called it
        if frame is None or frame.f_code is code:
            break
        frame = frame.f_back
    return {} if frame is None or frame.f_code is not code else frame.f_locals


def _sum_up(prompts: Sequence[Sequence[int]], steps: Sequence[Step]) -> Usage:
    drafted: Counter[str] = Counter()
    for step in steps:
        drafted.update(step.drafted_by)
    tokens = [token for step in steps for token in step.tokens]
    return Usage(
        prompt_tokens=sum(map(len, prompts)),
        cached_tokens=0,
        completion_tokens=len(tokens),
        passes=len(steps),
        drafted_by=dict(drafted),
        accepted_by=dict(Counter(token.source for token in tokens if token.source != TARGET)),
        relaxed=sum(token.relaxed for token in tokens),
    )
