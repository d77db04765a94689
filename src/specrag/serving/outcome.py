"""What every method's result has in common, so that one answer can be made of it, and what clients are told of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatch
from typing import Any

from specrag.engine.stopping import FinishReason
from specrag.methods.answer import Answer, Source
from specrag.methods.generation import Generation, Usage
from specrag.methods.long_context_result import ContextAnswer
from specrag.methods.ralm_result import IterativeAnswer
from specrag.methods.speculative_result import SpeculativeAnswer
from specrag.serving.places import shown
from specrag.speculation.decode import DecodedToken


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished text.

    Attributes:
        text: the text.
        finish_reason: ``"stop"`` or ``"length"``.
        prompt_tokens, cached_tokens, completion_tokens: counts.
        tokens: of the text, where its method tells them; without a text's lead that no model has made.
        lead: that text.
        sources: passages that it rests on.
        retrieved: passages that searches gave, where that is known.
        passes: of the target behind the prompt's.
        drafted_by, accepted_by: tokens by source.
        relaxed: tokens kept although the target would have chosen another.
        seconds: by phase.
        more: what only this method tells, as JSON.
    """

    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    tokens: tuple[DecodedToken, ...] = ()
    lead: str = ""
    sources: tuple[Source, ...] = ()
    retrieved: int = 0
    passes: int = 0
    drafted_by: Mapping[str, int] = field(default_factory=dict)
    accepted_by: Mapping[str, int] = field(default_factory=dict)
    relaxed: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def usage(self) -> dict[str, Any]:
        """The figures in the field ``specrag``."""
        drafted, accepted = sum(self.drafted_by.values()), sum(self.accepted_by.values())
        decoding = self.seconds.get("decode", 0.0)
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "drafted": drafted,
            "accepted": accepted,
            "drafted_by": dict(self.drafted_by),
            "accepted_by": dict(self.accepted_by),
            "relaxed": self.relaxed,
            "retrieved": self.retrieved,
            "passes": self.passes,
            "mat": self.completion_tokens / self.passes if self.passes else None,
            "tokens_per_second": self.completion_tokens / decoding if decoding else None,
            "seconds": dict(self.seconds),
        }


def describe_source(source: Source) -> dict[str, Any]:
    """A source for clients. Metadata are left out: they may hold what a knowledge base's owner did not mean to show."""
    passage = source.passage
    return {
        "number": source.number,
        "title": passage.title,
        "source": shown(passage.source),
        "place": passage.place,
        "text": passage.text,
        "score": source.score,
        "similarity": source.similarity,
        "cited": source.cited,
        "support": source.support,
    }


def add_up(outcomes: Sequence[Outcome], choices: int) -> dict[str, Any]:
    """OpenAI's counts over all texts; a prompt that several choices answer is counted once.

    Args:
        choices: of each prompt, side by side.
    """
    prompts = outcomes[::choices]
    prompt = sum(outcome.prompt_tokens for outcome in prompts)
    written = sum(outcome.completion_tokens for outcome in outcomes)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {
            "cached_tokens": sum(outcome.cached_tokens for outcome in prompts),
            "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


@singledispatch
def outcome_of(result: object) -> Outcome:
    """The outcome of a method's result."""
    raise TypeError(f"no outcome is made of {type(result).__name__}")


@outcome_of.register
def _(result: Generation) -> Outcome:
    timing = result.timing
    return Outcome(
        text=result.text,
        finish_reason=result.finish_reason,
        tokens=result.tokens,
        seconds={
            "prefill": timing.prefill,
            "decode": timing.decode,
            "drafting": timing.drafting,
            "verifying": timing.verifying,
        },
        **_counts(result.usage),
    )


@outcome_of.register
def _(result: Answer) -> Outcome:
    stats = result.stats
    retrieved = len(result.sources) + len(result.left_out)
    seconds = {"rewrite": stats.rewrite_seconds, "retrieval": stats.retrieval_seconds}
    more = {"abstained": result.abstained, "question": result.question}
    if result.generation is None:
        return Outcome(
            result.text, "stop", 0, 0, sources=result.sources, retrieved=retrieved, seconds=seconds, more=more
        )
    generated = outcome_of(result.generation)
    return Outcome(
        text=result.text,
        finish_reason=generated.finish_reason,
        tokens=generated.tokens,
        sources=result.sources,
        retrieved=retrieved,
        seconds={**seconds, **generated.seconds},
        more=more,
        **_counts(result.generation.usage),
    )


@outcome_of.register
def _(result: ContextAnswer) -> Outcome:
    stats, reading = result.stats, result.reading
    generated = outcome_of(result.generation)
    return replace(
        generated,
        text=result.text,
        retrieved=len(reading.chunks),
        cached_tokens=stats.cached_tokens,
        seconds={
            **generated.seconds,
            "retrieval": stats.retrieval_seconds,
            "prefill": stats.prefill_seconds,
            "decode": stats.decode_seconds,
        },
        more={
            "fallback": reading.fallback or None,
            "drafter_tokens": reading.drafter_tokens,
        },
    )


@outcome_of.register
def _(result: IterativeAnswer) -> Outcome:
    timing = result.timing
    more: dict[str, Any] = {
        "retrievals": len(result.chunks),
        "guessed_right": sum(round.matched for round in result.rounds),
        "discarded_tokens": result.counts.discarded_tokens,
    }
    if result.failure is not None:
        more["failure"] = "the knowledge base failed in mid-answer"
    return Outcome(
        text=result.text,
        finish_reason=result.finish_reason,
        tokens=result.tokens,
        sources=result.sources,
        retrieved=len(result.chunks),
        seconds={"retrieval": timing.retrieval, "prefill": timing.prefill, "decode": timing.decode},
        more=more,
        **_counts(result.usage),
    )


@outcome_of.register
def _(result: SpeculativeAnswer) -> Outcome:
    timing, usage = result.timing, result.usage
    best = None if result.best is None else result.drafts[result.best - 1]
    return Outcome(
        text=result.text,
        finish_reason="stop" if best is None else best.finish_reason,
        prompt_tokens=usage.drafter_prompt_tokens + usage.verifier_tokens,
        completion_tokens=usage.drafter_completion_tokens,
        sources=result.sources,
        retrieved=len(result.sources),
        passes=usage.drafter_passes,
        drafted_by=usage.drafted_by,
        accepted_by=usage.accepted_by,
        seconds={
            "retrieval": timing.retrieval,
            "embedding": timing.embedding,
            "clustering": timing.clustering,
            "decode": timing.drafting,
            "verification": timing.verification,
        },
        more={
            "abstained": result.abstained,
            "fallback": result.fallback,
            "best": result.best,
            "malformed": result.malformed,
        },
    )


def _counts(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "passes": usage.passes,
        "drafted_by": usage.drafted_by,
        "accepted_by": usage.accepted_by,
        "relaxed": usage.relaxed,
    }
