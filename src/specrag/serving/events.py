"""What a stream tells beside the text, where a request asks for events: sources, rounds, drafts, scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specrag.methods.answer import Sources
from specrag.methods.long_context_result import ContextReading
from specrag.methods.ralm_result import Retraction
from specrag.methods.speculative_result import DraftDone, DraftsScored, SubsetsDrawn, Verdict
from specrag.models.tokenizer import TextStream, Tokenizer
from specrag.serving.outcome import describe_source
from specrag.speculation.decode import Step

#: The source of text that no model has made, such as the beginning of an answer.
GIVEN = "given"


@dataclass(slots=True)
class Teller:
    """Describes what one text's method emits.

    Args:
        tokenizer: of the model.
        elapsed: seconds since the request began.
    """

    tokenizer: Tokenizer
    elapsed: Callable[[], float]
    _texts: TextStream = field(init=False)

    def __post_init__(self) -> None:
        self._texts = TextStream(self.tokenizer)

    def describe(self, emitted: object) -> dict[str, Any] | None:
        """An event for the client; ``None`` for what clients have no use for."""
        event = self._described(emitted)
        return None if event is None else {**event, "at": self.elapsed()}

    def _described(self, emitted: object) -> dict[str, Any] | None:
        if isinstance(emitted, Step):
            return self._step(emitted)
        if isinstance(emitted, Sources):
            return {
                "event": "sources",
                "sources": [describe_source(source) for source in emitted.sources],
                "question": emitted.question,
                "abstained": emitted.abstained,
                "left_out": len(emitted.left_out),
                "retrieval_seconds": emitted.retrieval_seconds,
                "rewrite_seconds": emitted.rewrite_seconds,
            }
        if isinstance(emitted, ContextReading):
            return {
                "event": "retrieval",
                "chunks": len(emitted.chunks),
                "prompt_tokens": emitted.prompt_tokens,
                "drafter_tokens": emitted.drafter_tokens,
                "fallback": emitted.fallback or None,
                "retrieval_seconds": emitted.retrieval_seconds,
            }
        if isinstance(emitted, Retraction):
            return {"event": "correction", "text": emitted.text, "tokens": emitted.tokens}
        if isinstance(emitted, SubsetsDrawn):
            return {"event": "subsets", "subsets": [list(subset) for subset in emitted.subsets]}
        if isinstance(emitted, DraftDone):
            draft = emitted.draft
            return {
                "event": "draft",
                "index": draft.number - 1,
                "passages": list(draft.sources),
                "rationale": draft.rationale,
                "answer": draft.answer,
                "malformed": draft.malformed,
                "tokens": draft.completion_tokens,
                "seconds": draft.seconds,
            }
        if isinstance(emitted, DraftsScored):
            return _scores(emitted)
        if isinstance(emitted, Verdict):
            winner = None if emitted.best is None else emitted.best - 1
            return {"event": "verdict", "winner": winner, "fallback": emitted.fallback}
        return None

    def _step(self, step: Step) -> dict[str, Any]:
        tokens = [
            {"text": self._texts.push(token.token), "source": token.source, "relaxed": token.relaxed}
            for token in step.tokens
        ]
        if step.text and not step.tokens:
            tokens = [{"text": step.text, "source": GIVEN, "relaxed": False}]
        return {
            "event": "step",
            "tokens": tokens,
            "drafted": dict(step.drafted_by),
            "accepted": step.accepted,
            "drafting_seconds": step.drafting,
            "verifying_seconds": step.verifying,
        }


def _scores(emitted: DraftsScored) -> dict[str, Any]:
    scored = [draft for draft in emitted.drafts if draft.scores is not None]
    best = max(scored, key=lambda draft: draft.scores.total if draft.scores else 0.0, default=None)
    return {
        "event": "scores",
        "winner": None if best is None else best.number - 1,
        "scores": [
            {
                "index": draft.number - 1,
                "draft": draft.scores.draft,
                "self_consistency": draft.scores.self_contain,
                "self_reflection": draft.scores.self_reflect,
                "total": draft.scores.total,
            }
            for draft in scored
            if draft.scores is not None
        ],
    }


def shown_text(emitted: object) -> str:
    """The characters that a client's text gains."""
    if isinstance(emitted, Step | Verdict):
        return emitted.text
    return ""
