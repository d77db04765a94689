"""How good a draft is: the three factors of Speculative RAG in log space (section 3.3); each can be left out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from specrag.engine import Coroutine
from specrag.errors import InputError
from specrag.methods.citations import without_citations
from specrag.methods.speculative_rag.cited import cited_prompt
from specrag.methods.speculative_rag.form import ParsedDraft
from specrag.methods.speculative_rag.task import Task
from specrag.models import PartScore, ScoredText, ScoringRequest, TextPart, TextScorer
from specrag.retrieval import Passage, passage_text

#: What the verifier reads beside the answer (Table 2): the draft's rationale, the draft's passages, or both. Our own
#: are ``all-passages``, those of all drafts, read once in front of the question, and ``best-passages``: the first few
#: in the prompt of standard RAG, after which a draft is as good as it is probable as the verifier's own answer.
Evidence: TypeAlias = Literal["rationale", "passages", "both", "all-passages", "best-passages"]

#: Passages that a verifier reads as it would to answer.
BEST = 5

#: Self-reflection statements R; the first is the paper's, the others are ours, replacing those of Table 7, which are
#: not printed.
STATEMENTS: Mapping[str, str] = {
    "explanation": "Do you think the explanation supports the answers? (Yes or No)",
    "rationale": "Does the rationale support the answer? (Yes or No)",
    "correct": "Is the answer to the question correct? (Yes or No)",
    "evidence": "Is there enough evidence for the answer? (Yes or No)",
    "agree": "Do you agree with this answer and its reason? (Yes or No)",
}
DEFAULT_STATEMENT = "explanation"

#: The question for a verifier that judges.
JUDGED = "Is this answer right, and does the text above say so? Answer Yes or No."


@dataclass(frozen=True, slots=True)
class Scoring:
    """How drafts are scored; the defaults are the paper's.

    Args:
        draft: count rho_draft, the drafter's own confidence.
        self_contain: count rho_SC, the verifier's probability of answer and evidence.
        self_reflect: count rho_SR, its probability of "Yes" after the statement.
        evidence: what the verifier reads and scores beside the answer.
        length_normalized: use the mean log-probability per token in each factor, instead of the paper's product, which
            prefers short drafts.
        statement: a name of :data:`STATEMENTS` or a sentence that can be answered with "Yes".
        chat: put the question into the verifier's chat template; the paper's verifiers read bare text.
        judge: instead of the paper's rho_SR, use the probability of "Yes" among "Yes" and "No" when the verifier is
            asked in its chat template whether the answer is right.
        calibrated: for a verifier that judges, count by how much the evidence makes it surer: the log-odds of "Yes"
            without any evidence are subtracted, so that an answer it likes anyway gains nothing (contextual
            calibration, Zhao et al. 2021).

    Raises:
        InputError: no factor is left, the statement is blank, or there is nothing to calibrate.
    """

    draft: bool = True
    self_contain: bool = True
    self_reflect: bool = True
    evidence: Evidence = "rationale"
    length_normalized: bool = False
    statement: str = DEFAULT_STATEMENT
    chat: bool = False
    judge: bool = False
    calibrated: bool = False

    def __post_init__(self) -> None:
        if not (self.draft or self.verifies):
            raise InputError("scoring", "no factor", "leave draft, self_contain or self_reflect switched on")
        if self.calibrated and not (self.judge and self.self_reflect):
            raise InputError(
                "calibrated", True, "ask the verifier to judge, by self-reflection, or leave it out"
            )
        if not self.statement.strip():
            raise InputError(
                "statement", self.statement, f"take one of {', '.join(STATEMENTS)} or a sentence"
            )

    @property
    def verifies(self) -> bool:
        """Whether it needs a verifier."""
        return self.self_contain or self.self_reflect

    @property
    def reflects(self) -> bool:
        """Whether the verifier is asked for the paper's rho_SR."""
        return self.self_reflect and not self.judge

    @property
    def weighs_choices(self) -> bool:
        """Whether choices need no drafter: only how probable the verifier itself finds each counts."""
        return self.evidence == "best-passages" and self.verifies and not self.draft

    @property
    def sentence(self) -> str:
        """The self-reflection statement."""
        return STATEMENTS.get(self.statement, self.statement)


@dataclass(frozen=True, slots=True)
class Measured:
    """The log-probabilities that a score is made of.

    Attributes:
        rationale: of the rationale after question and passages, by the drafter; ``None`` if it reports none, or has not
            written it.
        answer: of the answer after all that, by the drafter.
        self_contain: of answer and evidence after the question, by the verifier; ``None`` if there is none.
        self_reflect: of "Yes" after question, answer, evidence and statement, by the verifier.
    """

    rationale: PartScore | None
    answer: PartScore | None
    self_contain: PartScore | None = None
    self_reflect: PartScore | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """The factors of a draft in nats; ``None`` for one that does not count.

    Attributes:
        total: log rho, the sum of the factors.
    """

    draft: float | None
    self_contain: float | None
    self_reflect: float | None
    total: float


def score(measured: Measured, scoring: Scoring) -> Scores:
    """The factors of a draft and their product, in log space.

    Raises:
        InputError: a factor counts but was not measured.
    """

    def size(part: PartScore | None, factor: str) -> float:
        if part is None:
            raise InputError(
                "scoring", factor, "switch this factor off: a model gave no log-probabilities for it"
            )
        return part.mean if scoring.length_normalized else part.total

    draft = self_contain = self_reflect = None
    if scoring.draft:
        draft = size(measured.answer, "draft")
        if measured.rationale is not None:  # a sum of two probabilities, as printed in the paper
            draft = log_add_exp(size(measured.rationale, "draft"), draft)
    if scoring.self_contain:
        self_contain = size(measured.self_contain, "self_contain")
    if scoring.self_reflect:
        self_reflect = size(measured.self_reflect, "self_reflect")
    factors = (draft, self_contain, self_reflect)
    return Scores(*factors, total=sum(factor for factor in factors if factor is not None))


def log_add_exp(a: float, b: float) -> float:
    """log(e^a + e^b) without underflow."""
    high, low = max(a, b), min(a, b)
    return high if math.isinf(high) else high + math.log1p(math.exp(low - high))


_ANSWER, _PASSAGES, _RATIONALE, _YES = "answer", "passages", "rationale", "yes"


@dataclass(frozen=True, slots=True)
class Claim:
    """What a draft says, and the passages it is based on."""

    draft: ParsedDraft
    passages: Sequence[Passage]


@dataclass(frozen=True, slots=True)
class Verified:
    """The verifier's log-probabilities of a draft.

    Attributes:
        self_contain: of answer and evidence; ``None`` if not requested.
        self_reflect: of "Yes"; ``None`` if not requested.
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
    judged = scoring.judge and scoring.self_reflect
    requests: list[ScoringRequest] = []
    if scoring.self_contain or not judged:
        requests = [scoring_request(task, claim, scoring, passages) for claim in claims]
    asked: list[ScoringRequest] = []
    if judged:
        for claim in claims:
            asked += judging_requests(task, claim, _evidence(claim, scoring, passages))
            if scoring.calibrated:
                asked += judging_requests(task, claim, "")
    scored = yield from verifier.scoring([*requests, *asked])
    texts, answers = scored[: len(requests)], scored[len(requests) :]
    verified = [_verified(text) for text in texts] or [Verified(None, None, 0, 0)] * len(claims)
    if not judged:
        return verified
    each = len(answers) // max(len(claims), 1)
    return [_judged(one, answers[each * place :][:each]) for place, one in enumerate(verified)]


def scoring_request(
    task: Task, claim: Claim, scoring: Scoring, passages: Sequence[Passage]
) -> ScoringRequest:
    """The text of a draft as the verifier reads it.

    The question comes first, the same for all drafts, and after all passages if they are the evidence; the words
    between the parts are read, not scored.
    """
    wanted = scoring.self_contain
    answer = without_citations(task.written(claim.draft.answer))
    statement = [
        TextPart("statement", f"\n{scoring.sentence}", scored=False),
        TextPart(_YES, " Yes", scored=scoring.reflects),
    ]
    if scoring.evidence == "best-passages":
        said = TextPart(_ANSWER, answer, scored=wanted)
        return ScoringRequest(
            _own_prompt(task, passages[:BEST]), (said, *(statement if scoring.reflects else ()))
        )
    parts = [
        TextPart("before answer", "Answer:" if scoring.chat else "\nAnswer:", scored=False),
        TextPart(_ANSWER, f" {answer}", scored=wanted),
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
    parts += statement
    asked = _behind(passages, task) if scoring.evidence == "all-passages" else task.asked
    prompt = [{"role": "user", "content": asked}] if scoring.chat else asked
    return ScoringRequest(prompt, tuple(parts))


def judging_requests(task: Task, claim: Claim, evidence: str) -> tuple[ScoringRequest, ScoringRequest]:
    """Ask the verifier whether a draft is right: one request for its "Yes", one for its "No"."""
    answer = without_citations(task.written(claim.draft.answer))
    content = f"{evidence}\n\n{task.asked}\nAnswer: {answer}\n\n{JUDGED}".lstrip()
    prompt = [{"role": "user", "content": content}]
    yes, no = (ScoringRequest(prompt, (TextPart(_YES, said),)) for said in ("Yes", "No"))
    return yes, no


def _evidence(claim: Claim, scoring: Scoring, passages: Sequence[Passage]) -> str:
    """What a verifier that judges reads in front of the question."""
    return {
        "rationale": claim.draft.rationale,
        "passages": _texts(claim.passages),
        "both": f"{_texts(claim.passages)}\n\n{claim.draft.rationale}",
        "all-passages": _texts(passages),
        "best-passages": _texts(passages[:BEST]),
    }[scoring.evidence]


def _own_prompt(task: Task, passages: Sequence[Passage]) -> Sequence[Mapping[str, str]]:
    """The prompt that the verifier itself would answer."""
    if task.kind == "free-form":
        return cited_prompt(task, passages)
    return [{"role": "user", "content": _behind(passages, task)}]


def _behind(passages: Sequence[Passage], task: Task) -> str:
    return f"{_texts(passages)}\n\n{task.asked}"


def _judged(verified: Verified, said: Sequence[ScoredText]) -> Verified:
    """Add the probability of "Yes" among "Yes" and "No".

    Args:
        said: "Yes" and "No", and for a calibrated verifier both again without the evidence.
    """
    odds = [
        yes.parts[_YES].total - no.parts[_YES].total for yes, no in zip(said[::2], said[1::2], strict=True)
    ]
    share = PartScore((-log_add_exp(0.0, sum(odds[1:]) - odds[0]),))
    tokens = verified.tokens + sum(text.prompt_tokens for text in said)
    read = verified.read_tokens + sum(text.read_tokens for text in said)
    return Verified(verified.self_contain, share, tokens, read)


def _texts(passages: Sequence[Passage]) -> str:
    return "\n".join(passage_text(passage.title, passage.text.strip()) for passage in passages)


def _verified(text: ScoredText) -> Verified:
    found = [text.parts[name] for name in (_ANSWER, _PASSAGES, _RATIONALE) if name in text.parts]
    contained = PartScore(tuple(value for part in found for value in part.log_probs)) if found else None
    return Verified(contained, text.parts.get(_YES), text.prompt_tokens, text.read_tokens)
