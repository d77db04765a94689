"""What ``specrag bench tokens`` times: our methods and transformers' own, on the same prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from specrag.bench.interleave import Trial
from specrag.bench.machine import half_precision
from specrag.bench.records import Outcome
from specrag.engine.session import Session
from specrag.language_model import LanguageModel, load
from specrag.methods import token_decoders as baselines
from specrag.methods.base import Decoder
from specrag.methods.decoding import DecodingMethod, make_decoder
from specrag.methods.drafters import NamedDrafter
from specrag.methods.registry import method_class, method_names, own_names
from specrag.methods.resources import Resources
from specrag.methods.retrieval_decoder import RetrievalDecoder
from specrag.methods.token_decoders import PlainDecoder
from specrag.models.catalog import resolve
from specrag.models.eagle_files import shipped_heads
from specrag.speculation.decode import Settings, Speculation
from specrag.speculation.drafters.pair import FirstNonEmpty
from specrag.speculation.drafters.retrieval import EntropyTrigger, RetrievalSettings

PLAIN, ADAPTIVE, RELAXED, RESPEC = "plain", "adaptive", "adaptive+relaxed", "respec"
TRANSFORMERS, LOOKUP, ASSISTED = "transformers", "transformers-lookup", "transformers-assisted"

#: Ours, by the name in the results. Unless a name says otherwise the settings are those of the papers.
OURS: Mapping[str, Callable[[], Decoder]] = {
    PLAIN: PlainDecoder,
    ADAPTIVE: RetrievalDecoder,
    RELAXED: lambda: RetrievalDecoder(relaxed=True),
    RESPEC: lambda: _published(),
    "prompt-lookup": baselines.prompt_lookup,
    "token-recycling": baselines.token_recycling,
    "sam-decoding": baselines.sam_decoding,
}

#: A smaller model of the catalog, which drafts for any other in tokens of its own.
DRAFT_MODEL = "smollm2-135m"

#: What only a target larger than the draft model is measured with.
DRAFTED: Mapping[str, Callable[[], Decoder]] = {
    "draft-model": lambda: baselines.Drafted("draft-model", f"model:{DRAFT_MODEL}", None),
    "adaptive+draft-model": lambda: RetrievalDecoder(drafter=f"model:{DRAFT_MODEL}"),
    "adaptive+draft-model+relaxed": lambda: RetrievalDecoder(drafter=f"model:{DRAFT_MODEL}", relaxed=True),
}


def headed(model: str) -> Mapping[str, Callable[[], Decoder]]:
    """What only a model is measured with whose EAGLE-2 head comes with specrag."""
    if model not in shipped_heads():
        return {}
    head = f"eagle:{model}"
    sam = partial(baselines.Drafted, "sam-decoding", head, baselines.EAGLE_NODES, copy_first=True)
    return {
        RESPEC: lambda: _published(drafter=head),  # the paper's own drafter
        "respec+relaxed": lambda: _published(drafter=head, relaxed=True),
        "respec+recycling": _published,
        "eagle-2": lambda: baselines.eagle(model),
        "sam-decoding+eagle-2": sam,
        "prompt-lookup+eagle-2": lambda: _LookupFirst(head),
        "eagle-2+cost-aware": lambda: baselines.Drafted("eagle-2", head, None),
        "adaptive+eagle-2": lambda: RetrievalDecoder(drafter=head),
        "adaptive+eagle-2+relaxed": lambda: RetrievalDecoder(drafter=head, relaxed=True),
    }


class _LookupFirst(baselines.Drafted):
    """Copies behind the newest n-gram; a head guesses where there is none."""

    def __init__(self, head: str) -> None:
        super().__init__("prompt-lookup", head, baselines.EAGLE_NODES)

    def speculation(self, session: Session, settings: Settings) -> Speculation:
        found = super().speculation(session, settings)
        lookup = NamedDrafter("lookup").make(session.model, None)
        drafter = FirstNonEmpty(lookup, found.drafter, lambda: baselines.EAGLE_NODES)
        return replace(found, drafter=drafter)


def brought() -> Mapping[str, Callable[[], Decoder]]:
    """Methods of other packages that decode tokens, with their default settings."""
    return {
        name: partial(make_decoder, name, Resources())
        for name in method_names()
        if name not in own_names() and issubclass(method_class(name), DecodingMethod)
    }


def all_of(model: str) -> Mapping[str, Callable[[], Decoder]]:
    """All that a model is measured with but transformers' own."""
    return {**OURS, **({} if model == DRAFT_MODEL else DRAFTED), **headed(model), **brought()}


def lossless(model: str) -> Mapping[str, Callable[[], Decoder]]:
    """Those of them that guess, and accept only what plain decoding would choose."""
    return {label: make for label, make in all_of(model).items() if label != PLAIN and "relaxed" not in label}


def _published(*, drafter: str = "recycling", relaxed: bool = False, **changes: Any) -> RetrievalDecoder:
    """ReSpec as its paper has it: a trigger chooses between copying and guessing, 60 nodes each round."""
    settings = replace(RetrievalSettings(combine=False), **changes)
    return RetrievalDecoder(drafter, relaxed, cost_aware=False, retrieval=settings, name=RESPEC)


def _triggered(threshold: float) -> RetrievalDecoder:
    trigger = EntropyTrigger(threshold=threshold)
    return RetrievalDecoder(retrieval=RetrievalSettings(trigger=trigger, combine=False))


#: Each idea of ReSpec switched off alone, each drafter, and the baselines with our schedule. ``respec`` is the paper's
#: own configuration; the others weigh guesses by their cost.
ABLATION: Mapping[str, Callable[[], Decoder]] = {
    PLAIN: PlainDecoder,
    ADAPTIVE: RetrievalDecoder,
    "adaptive+no-scores": lambda: RetrievalDecoder(retrieval=RetrievalSettings(feedback_rate=None)),
    "adaptive+trigger": lambda: RetrievalDecoder(retrieval=RetrievalSettings(combine=False)),
    "adaptive+trigger=0.75": lambda: _triggered(0.75),
    "adaptive+trigger=3": lambda: _triggered(3.0),
    "respec": _published,
    "respec+no-trigger": lambda: _published(trigger=None),
    "respec+no-scores": lambda: _published(feedback_rate=None),
    "respec+relaxed": lambda: _published(relaxed=True),
    "adaptive+relaxed": lambda: RetrievalDecoder(relaxed=True),
    "adaptive+lookup": lambda: RetrievalDecoder(drafter="lookup"),
    "adaptive+no-drafter": lambda: RetrievalDecoder(drafter="none"),
    "prompt-lookup": baselines.prompt_lookup,
    "token-recycling": baselines.token_recycling,
    "sam-decoding": baselines.sam_decoding,
    "prompt-lookup+cost-aware": lambda: baselines.Drafted("prompt-lookup", "lookup", None),
    "token-recycling+cost-aware": lambda: baselines.Drafted("token-recycling", "recycling", None),
    "sam-decoding+cost-aware": lambda: baselines.Drafted("sam-decoding", "recycling", None, copy_first=True),
}


@dataclass(frozen=True)
class Prompt:
    """A prompt in the model's chat template."""

    task: str
    name: str
    tokens: tuple[int, ...]


class OurTokens:
    """This engine's methods over one loaded model; a method learns from prompt to prompt, as in use.

    Args:
        dtype: of the weights; bf16 is fp32 where the processor has no products of bf16.
        batch_invariant: so that all lossless methods write one text.
    """

    def __init__(
        self,
        name: str,
        device: str,
        methods: Mapping[str, Callable[[], Decoder]],
        *,
        dtype: str = "bf16",
        batch_invariant: bool = False,
    ) -> None:
        self.dtype = half_precision(device) if dtype == "bf16" else dtype
        self.llm: LanguageModel = load(name, dtype=self.dtype, device=device, batch_invariant=batch_invariant)
        self._methods = {label: make() for label, make in methods.items()}
        self._synchronise = torch.cuda.synchronize if device.startswith("cuda") else _nothing

    @property
    def labels(self) -> tuple[str, ...]:
        """The methods that there are."""
        return tuple(self._methods)

    def trial(self, label: str, prompt: Prompt, new: int) -> Trial:
        """Prefill and decode up to ``new`` tokens, greedily."""

        def run() -> Outcome:
            self._synchronise()
            started = time.perf_counter()
            made = self.llm.generate(prompt.tokens, method=self._methods[label], max_tokens=new)
            self._synchronise()
            seconds = time.perf_counter() - started
            usage, timing = made.usage, made.timing
            rounds = max(usage.passes, 1)
            return Outcome(
                tokens=usage.completion_tokens,
                seconds=seconds,
                output=str([token.token for token in made.tokens]),
                passes=usage.passes,
                drafted=usage.drafted,
                accepted=usage.accepted,
                drafted_by=dict(usage.drafted_by),
                accepted_by=dict(usage.accepted_by),
                figures={
                    "prefill_ms": 1e3 * timing.prefill,
                    "decode_ms_per_token": 1e3 * timing.decode / max(usage.completion_tokens, 1),
                    "draft_ms": 1e3 * timing.drafting / rounds,
                    "verify_ms": 1e3 * timing.verifying / rounds,
                    "drafted_per_pass": usage.drafted / rounds,
                    "relaxed_tokens": float(usage.relaxed),
                },
            )

        return run


class TheirTokens:
    """transformers' ``generate`` in bf16: plain, with prompt lookup, and assisted by another model.

    Args:
        assistant: the assisting model's name; of another vocabulary, as far as the catalog goes.
    """

    def __init__(self, name: str, device: str, eos: frozenset[int], assistant: str | None) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        def read(what: str) -> Any:
            folder = resolve(what).folder
            return AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16 if half_precision(device) == "bf16" else torch.float32
            ).to(device)

        self._module = read(name)
        self._device = device
        self._eos = sorted(eos)
        self._options: dict[str, dict[str, Any]] = {
            TRANSFORMERS: {},
            LOOKUP: {"prompt_lookup_num_tokens": baselines.PROMPT_LOOKUP_TOKENS},
        }
        if assistant is not None:
            self._options[ASSISTED] = {
                "assistant_model": read(assistant),
                "tokenizer": AutoTokenizer.from_pretrained(resolve(name).folder),
                "assistant_tokenizer": AutoTokenizer.from_pretrained(resolve(assistant).folder),
            }
        self._synchronise = torch.cuda.synchronize if device.startswith("cuda") else _nothing

    @property
    def labels(self) -> tuple[str, ...]:
        """The methods that there are."""
        return tuple(self._options)

    def trial(self, label: str, prompt: Prompt, new: int) -> Trial:
        """Prefill and decode up to ``new`` tokens, greedily."""
        ids = torch.tensor([prompt.tokens], device=self._device)
        options = self._options[label]

        @torch.inference_mode()
        def run() -> Outcome:
            self._synchronise()
            started = time.perf_counter()
            made = self._module.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                do_sample=False,
                eos_token_id=self._eos,
                pad_token_id=self._eos[0],
                **options,
            )
            self._synchronise()
            seconds = time.perf_counter() - started
            output = made[0, len(prompt.tokens) :].tolist()
            return Outcome(tokens=len(output), seconds=seconds, output=str(output))

        return run


def _nothing() -> None:
    pass
