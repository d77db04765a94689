"""One scoring pass of the verifier over all drafts (section 3.3): question, answer, rationale, statement, "Yes"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrag.engine.passes import Coroutine
from specrag.methods.draft_format import ParsedDraft
from specrag.methods.draft_scores import Scoring
from specrag.methods.draft_task import Task
from specrag.models.roles import PartScore, ScoredText, ScoringRequest, TextPart, TextScorer
from specrag.retrieval.passage import Passage, passage_text

_ANSWER, _PASSAGES, _RATIONALE, _YES = "answer", "passages", "rationale", "yes"


@dataclass(frozen=True, slots=True)
class Claim:
    """What a draft says, and what it says it from."""

    draft: ParsedDraft
    passages: Sequence[Passage]


@dataclass(frozen=True, slots=True)
class Verified:
    """The verifier's log-probabilities of a draft.

    Attributes:
        self_contain: of answer and evidence; ``None`` where it was not asked for.
        self_reflect: of "Yes"; ``None`` where it was not asked for.
        tokens: tokens of the text that was scored.
        read_tokens: those of them that no other draft shared.
    """

    self_contain: PartScore | None
    self_reflect: PartScore | None
    tokens: int
    read_tokens: int


def verifying(
    verifier: TextScorer,
    task: Task,
    claims: Sequence[Claim],
    scoring: Scoring,
    passages: Sequence[Passage],
) -> Coroutine[list[Verified]]:
    """Score every draft, all in one packed pass.

    Args:
        passages: all that the drafts were written from, for a verifier that reads them all.

    Raises:
        ContextLengthError: the verifier cannot read a draft with its evidence.
    """
    requests = [scoring_request(task, claim, scoring, passages) for claim in claims]
    scored = yield from verifier.scoring(requests)
    return [_verified(text) for text in scored]


def scoring_request(
    task: Task, claim: Claim, scoring: Scoring, passages: Sequence[Passage]
) -> ScoringRequest:
    """The text of a draft as the verifier reads it. The question stands first, for all drafts the same, behind all
    passages where they are the evidence; the words between the parts are read, not scored.
    """
    wanted = scoring.self_contain
    parts = [
        TextPart("before answer", "Answer:" if scoring.chat else "\nAnswer:", scored=False),
        TextPart(_ANSWER, f" {task.written(claim.draft.answer)}", scored=wanted),
    ]
    if scoring.evidence in ("passages", "both"):
        parts += [
            TextPart("before passages", "\nPassages:", scored=False),
            TextPart(_PASSAGES, f" {_texts(claim.passages)}", scored=wanted),
        ]
    if scoring.evidence in ("rationale", "both"):
        parts += [
            TextPart("before rationale", "\nRationale:", scored=False),
            TextPart(_RATIONALE, f" {claim.draft.rationale}", scored=wanted),
        ]
    parts += [
        TextPart("statement", f"\n{scoring.sentence}", scored=False),
        TextPart(_YES, " Yes", scored=scoring.self_reflect),
    ]
    asked = f"{_texts(passages)}\n\n{task.asked}" if scoring.evidence == "all-passages" else task.asked
    prompt = [{"role": "user", "content": asked}] if scoring.chat else asked
    return ScoringRequest(prompt, tuple(parts))


def _texts(passages: Sequence[Passage]) -> str:
    return "\n".join(passage_text(passage.title, passage.text.strip()) for passage in passages)


def _verified(text: ScoredText) -> Verified:
    found = [text.parts[name] for name in (_ANSWER, _PASSAGES, _RATIONALE) if name in text.parts]
    contained = PartScore(tuple(value for part in found for value in part.log_probs)) if found else None
    return Verified(contained, text.parts.get(_YES), text.prompt_tokens, text.read_tokens)
