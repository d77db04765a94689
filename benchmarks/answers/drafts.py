"""Drafts as a record keeps them, so that other verdicts on them need no other run."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.answers.data import Question
from benchmarks.answers.draft_baselines import DRAFTER_ALONE, best_by, random_draft
from specrag.bench.metrics import normalize_answer
from specrag.methods.speculative_rag.result import SpeculativeAnswer
from specrag.methods.speculative_rag.scoring import Measured, Scoring, score
from specrag.models.roles import PartScore

_FACTORS: Mapping[str, tuple[bool, bool, bool]] = {
    "all": (True, True, True),
    "drafter-alone": (True, False, False),
    "without-draft": (False, True, True),
    "without-self-contain": (True, False, True),
    "without-self-reflect": (True, True, False),
    "self-contain-alone": (False, True, False),
    "self-reflect-alone": (False, False, True),
}

_SIZES = ("mean", "product")

#: Scorings that one run answers for: each factor left out (Table 3), each alone; with the mean log-probability a token
#: or with the paper's product.
SCORINGS: Mapping[str, Scoring] = {
    f"{size}-{name}": Scoring(draft=a, self_contain=b, self_reflect=c, length_normalized=size == "mean")
    for size in _SIZES
    for name, (a, b, c) in _FACTORS.items()
}
ALONE, RANDOM, ORACLE = "drafter-alone", "random-draft", "oracle"


@dataclass(frozen=True, slots=True)
class KeptDraft:
    """A draft of a record.

    Attributes:
        measured: ``None`` where malformed.
        sources: numbers of its passages; where a retriever has ranked them 1 is the best.
        words, passage_words: of the rationale, and of the passages that it was written from.
    """

    answer: str
    right: bool
    measured: Measured | None
    sources: tuple[int, ...]
    words: int
    passage_words: int

    @property
    def ranked(self) -> float:
        """How well its passages were found: the log of the sum of their reciprocal ranks."""
        return math.log(sum(1 / number for number in self.sources))


def write_drafts(question: Question, answer: SpeculativeAnswer) -> str:
    """The drafts of an answer as one line of JSON."""
    texts = {source.number: source.passage.text for source in answer.sources}
    kept = []
    for draft in answer.drafts:
        measured = draft.measured
        kept.append(
            {
                "answer": draft.answer,
                "right": bool(draft.answer) and question.is_right(draft.answer),
                "sources": list(draft.sources),
                "rationale": draft.rationale,
                "words": len(draft.rationale.split()),
                "passage_words": sum(len(texts[number].split()) for number in draft.sources),
                "measured": None
                if measured is None
                else {
                    name: _written(getattr(measured, name))
                    for name in ("rationale", "answer", "self_contain", "self_reflect")
                },
                **({"text": draft.text} if draft.malformed else {}),
            }
        )
    return json.dumps({"text": answer.text, "drafts": kept}, ensure_ascii=False)


def read_text(line: str) -> str:
    """The answer that was taken, of what :func:`write_drafts` wrote."""
    text: str = json.loads(line)["text"]
    return text


def read_drafts(line: str) -> list[KeptDraft]:
    """The drafts that :func:`write_drafts` wrote."""
    return [
        KeptDraft(
            entry["answer"],
            entry["right"],
            None
            if entry["measured"] is None
            else Measured(**{name: _read(value) for name, value in entry["measured"].items()}),
            tuple(entry["sources"]),
            entry["words"],
            entry["passage_words"],
        )
        for entry in json.loads(line)["drafts"]
    ]


def verdicts(drafts: Sequence[KeptDraft], seed: int, *, ranked: bool = False) -> dict[str, float]:
    """Whether the draft is right that each other verdict takes, by the verdict's name.

    A verdict for which a factor was not measured is left out. Where no draft can be scored every verdict is wrong.

    Args:
        seed: of the random draft.
        ranked: whether the passages' numbers are ranks.
    """
    measured = [draft.measured for draft in drafts]
    found: dict[str, float] = {}
    for name, scoring in SCORINGS.items():
        if _is_measured(measured, scoring):
            best = best_by(measured, scoring)
            found[name] = float(best is not None and drafts[best].right)
    for size in _SIZES:
        if drafts and _is_measured(measured, SCORINGS[f"{size}-all"]):
            found |= _ours(drafts, size, ranked)
    best = best_by(measured, DRAFTER_ALONE)
    found[ALONE] = float(best is not None and drafts[best].right)
    chosen = random_draft(measured, seed)
    found[RANDOM] = float(chosen is not None and drafts[chosen].right)
    found[ORACLE] = float(any(draft.right for draft in drafts))
    return found


def _ours(drafts: Sequence[KeptDraft], size: str, ranked: bool) -> dict[str, float]:
    """Verdicts that the paper does not have, on its score of all factors.

    ``ranked`` adds how well a draft's passages were found, which dealing them out forgets. ``voted`` takes the answer
    whose drafts have the largest sum of probabilities, as self-consistency does (Wang et al. 2023, section 2).
    """
    scoring = SCORINGS[f"{size}-all"]
    plain = [-math.inf if one.measured is None else score(one.measured, scoring).total for one in drafts]
    chosen = {f"{size}-voted": _voted(drafts, plain)}
    if ranked:
        by_rank = [total + draft.ranked for total, draft in zip(plain, drafts, strict=True)]
        chosen[f"{size}-ranked"] = by_rank.index(max(by_rank))
        chosen[f"{size}-voted-ranked"] = _voted(drafts, by_rank)
    return {name: float(plain[index] > -math.inf and drafts[index].right) for name, index in chosen.items()}


def _voted(drafts: Sequence[KeptDraft], totals: Sequence[float]) -> int:
    """The best draft of the answer that most of the probability is for."""
    most = max(totals)
    votes: dict[str, float] = defaultdict(float)
    for draft, total in zip(drafts, totals, strict=True):
        votes[normalize_answer(draft.answer)] += math.exp(total - most) if total > -math.inf else 0.0
    answer = max(votes, key=votes.__getitem__)
    return max(
        (index for index, draft in enumerate(drafts) if normalize_answer(draft.answer) == answer),
        key=totals.__getitem__,
    )


def _is_measured(measured: Sequence[Measured | None], scoring: Scoring) -> bool:
    known = [one for one in measured if one is not None]
    wanted = ["rationale", "answer"] if scoring.draft else []
    wanted += ["self_contain"] if scoring.self_contain else []
    wanted += ["self_reflect"] if scoring.self_reflect else []
    return all(getattr(one, name) is not None for one in known for name in wanted)


def _written(part: PartScore | None) -> list[float] | None:
    """Sum and count say all that a score needs."""
    return None if part is None else [round(part.total, 5), part.count]


def _read(value: Any) -> PartScore | None:
    return None if value is None else PartScore((value[0] / max(value[1], 1),) * int(value[1]))
