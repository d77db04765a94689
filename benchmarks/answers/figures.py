"""From records to published figures: accuracy with its interval, paired differences, latency, tokens."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from types import MappingProxyType

import numpy as np

from benchmarks.answers.data import SIZES, Question
from benchmarks.answers.drafts import ALONE, ORACLE, RANDOM, read_drafts, read_text, verdicts
from specrag.bench.measurement import OVERALL, Extra, Measurement
from specrag.bench.metrics import token_f1
from specrag.bench.records import Record
from specrag.bench.statistics import PairedTimes, overall_speedup, paired_bootstrap
from specrag.bench.suite import BenchContext
from specrag.methods.citations import without_citations

STANDARD, SPECULATIVE = "standard-rag", "speculative-rag"
PLAIN = f"{STANDARD}+plain-prompt"

#: Parts a row's name: the model's label, the question's identifier.
SEPARATOR = " | "

#: The section of modelled figures.
SEPARATE = "separate machines"

#: The sections of other verdicts on the same drafts, and of what might mend them; their sets together.
SCORES, REMEDIED, ALL_SETS = "scores", "remedies", "all sets"

#: A figure: whether free text is right if its rationale counts too.
EXPLAINED = "right_with_rationale"

_IN_MAIN_TABLE = (ALONE, RANDOM, ORACLE)
_MILLISECONDS = 1e3
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\W\d]*[A-Z])|\n")


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a method did on a question.

    Attributes:
        task: the set, or a section with the set.
        row: the question's identifier with its set's name.
        model: the model, or drafter and verifier.
        seconds: ``None`` where the method's time is nobody's: an oracle.
        said, gold: labels of a claim, the one that was named (empty if none was) and the right one.
    """

    task: str
    row: str
    model: str
    method: str
    correct: float
    seconds: float | None
    figures: Mapping[str, float]
    said: str | None = None
    gold: str | None = None


def cases(records: Sequence[Record], questions: Mapping[str, Question] = MappingProxyType({})) -> list[Case]:
    """The runs that succeeded, and what else their drafts tell: other verdicts in the section ``scores``.

    Args:
        questions: by :attr:`Case.row`, for what only a text tells: see :func:`_read_anew`.
    """
    found = []
    for record in records:
        outcome = record.outcome
        if outcome is None or outcome.correct is None:
            continue
        key = record.key
        model, _, identifier = key.row.rpartition(SEPARATOR)
        case = Case(
            task=key.task,
            row=f"{key.task.rpartition('/')[2]} {identifier}",
            model=model,
            method=key.method,
            correct=outcome.correct,
            seconds=outcome.seconds,
            figures=outcome.figures,
        )
        drafts = outcome.output if key.method.startswith(SPECULATIVE) else None
        text = outcome.output if drafts is None else read_text(drafts)
        if case.row in questions and text is not None:
            case = _read_anew(case, questions[case.row], text)
        found += [case] if drafts is None else _with_other_verdicts(case, drafts)
    return found


def _read_anew(case: Case, question: Question, text: str) -> Case:
    """The case with what its text tells: of a claim the label, of free text how it is worded.

    A long text contains a gold answer more easily than a short one, so SQuAD's F1 of its words stands beside, and
    both of its first sentence.
    """
    if question.task.kind == "claim-checking":
        return replace(case, said=question.choice(text), gold=question.answers[0])
    if question.task.kind != "free-form":
        return case
    bare = without_citations(text)
    first = first_sentence(bare)
    worded = {
        "answer_words": float(len(bare.split())),
        "f1": token_f1(bare, question.answers),
        "right_first_sentence": float(question.is_right(first)),
        "f1_first_sentence": token_f1(first, question.answers),
    }
    return replace(case, figures={**case.figures, **worded})


def first_sentence(text: str) -> str:
    """Up to the first end of a sentence that another one follows."""
    return _SENTENCE_END.split(text.strip(), maxsplit=1)[0]


def _with_other_verdicts(case: Case, line: str) -> list[Case]:
    drafts = read_drafts(line)
    words = sum(draft.words for draft in drafts)
    passage_words = sum(draft.passage_words for draft in drafts)
    figures = dict(case.figures)
    if drafts and words:
        figures |= {"rationale_words": words / len(drafts), "passage_words": passage_words / len(drafts)}
    case = replace(case, figures=figures)
    section, _, name = case.task.rpartition("/")
    if section not in ("", REMEDIED) or (not section and case.method != SPECULATIVE):
        return [case]
    # Without the verifier's pass, whose time is known apart.
    alone = (case.seconds or 0.0) - case.figures.get("verification_ms", 0.0) / _MILLISECONDS
    other = replace(case, figures={}, said=None, gold=None)
    ranked = name in SIZES and name != "sample"  # whose passages have no order
    derived = [
        replace(
            other,
            task=case.task if verdict in _IN_MAIN_TABLE else f"{SCORES}/{name}",
            method=f"{case.method}+{verdict}",
            correct=correct,
            seconds=alone if verdict in (ALONE, RANDOM) else None,
        )
        for verdict, correct in verdicts(drafts, seed=len(case.row), ranked=ranked).items()
        if not section or verdict not in (ALONE, RANDOM)
    ]
    return [case, *derived]


def unchanged(found: Sequence[Case], sections: Iterable[str]) -> list[Case]:
    """Speculative RAG as it is, in the sections that change one setting of it, on the questions that these have."""
    sections = set(sections)
    whole = {
        (case.row, case.model): case
        for case in found
        if (case.method, "/" in case.task) == (SPECULATIVE, False)
    }
    asked = {
        (case.task, case.row, case.model): None for case in found if case.task.partition("/")[0] in sections
    }
    return [replace(whole[row, model], task=task) for task, row, model in asked if (row, model) in whole]


def pooled(found: Sequence[Case], section: str, kept: Collection[str]) -> list[Case]:
    """The cases with those of a section as one task over all its sets; the sets that are kept stand beside it."""
    own = [case for case in found if case.task.startswith(f"{section}/")]
    if len({case.task for case in own}) < 2:
        return list(found)
    others = [case for case in found if not case.task.startswith(f"{section}/")]
    beside = [case for case in own if case.task.partition("/")[2] in kept]
    return [*others, *(replace(case, task=f"{section}/{ALL_SETS}") for case in own), *beside]


def separated(found: Sequence[Case]) -> list[Case]:
    """Speculative RAG as if every draft had a machine of its own, modelled.

    Its drafting takes as long as the single draft of the same question took (``m=1``).
    """
    single = {
        (case.row, case.model): case.figures["drafting_ms"]
        for case in found
        if case.task.startswith("drafts/") and case.method == f"{SPECULATIVE}+m=1"
    }
    modelled = []
    for case in found:
        one = single.get((case.row, case.model))
        if case.method == SPECULATIVE and "/" not in case.task and one is not None and case.seconds:
            saved = max(case.figures["drafting_ms"] - one, 0.0) / _MILLISECONDS
            modelled.append(
                replace(
                    case,
                    task=f"{SEPARATE}/{case.task}",
                    method=f"{SPECULATIVE}+separate-drafters",
                    seconds=case.seconds - saved,
                    figures={},
                )
            )
    return modelled


def grouped(found: Sequence[Case], groups: Mapping[str, str]) -> list[Case]:
    """The cases of sets whose questions are of several types, as the section ``types``.

    Args:
        groups: a row's type.
    """
    return [
        replace(case, task=f"types/{case.task} {groups[case.row]}")
        for case in found
        if "/" not in case.task and groups.get(case.row)
    ]


def summarise(context: BenchContext, found: Sequence[Case], verifier: str) -> list[Measurement]:
    """The figures of every method on every set, compared with the best standard RAG of the verifier's model.

    Which prompt is best is decided on the same questions, in the baseline's favour.
    """
    measured = []
    for task, of_task in _by_task(found).items():
        best = _best_standard(found, task, verifier)
        for (model, method), own in _by_method(of_task).items():
            baseline = best if best is not None and (model, method) != (verifier, best[0].method) else None
            measured.append(_measurement(context, task, model, method, own, baseline))
    return measured


def tuning(
    context: BenchContext, found: Sequence[Case], untuned: str, tuned: Sequence[str]
) -> list[Measurement]:
    """What training changed: each tuned drafter beside the untuned one, by the same method on the same questions.

    Args:
        untuned, tuned: labels of configurations.
    """
    measured = []
    for task, of_task in _by_task([case for case in found if "/" not in case.task]).items():
        by_method = _by_method(of_task)
        for (model, method), own in by_method.items():
            before = by_method.get((untuned, method))
            if model in tuned and before:
                measured.append(_measurement(context, f"tuning/{task}", model, method, own, before))
    return measured


def _by_task(found: Sequence[Case]) -> dict[str, list[Case]]:
    """By task, the summary over all sets first."""
    tasks: dict[str, list[Case]] = defaultdict(list)
    whole = [case for case in found if "/" not in case.task]
    sets = {case.task for case in whole}
    if len(sets) > 1:
        tasks[OVERALL] = whole
    for case in found:
        tasks[case.task].append(case)
    return tasks


def _by_method(found: Sequence[Case]) -> dict[tuple[str, str], list[Case]]:
    methods: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in found:
        methods[case.model, case.method].append(case)
    return methods


def _best_standard(found: Sequence[Case], task: str, verifier: str) -> list[Case] | None:
    """The cases of the better prompt, on the questions of a task."""
    rows = {case.row for case in found if case.task == task or task == OVERALL}
    candidates = [
        own
        for method in (STANDARD, PLAIN)
        if (
            own := [
                case
                for case in found
                if (case.model, case.method) == (verifier, method)
                and case.row in rows
                and "/" not in case.task
            ]
        )
    ]
    return max(candidates, key=lambda own: fmean(case.correct for case in own)) if candidates else None


def _measurement(
    context: BenchContext,
    task: str,
    model: str,
    method: str,
    own: Sequence[Case],
    baseline: Sequence[Case] | None,
) -> Measurement:
    correct = [case.correct for case in own]
    spread = paired_bootstrap(correct, [0.0] * len(correct))
    extra: dict[str, Extra] = {"accuracy_low": max(spread.low, 0.0), "accuracy_high": min(spread.high, 1.0)}
    extra |= _by_label(own)
    speedup = None
    other = {case.row: case for case in baseline or ()}
    pairs = [(case, other[case.row]) for case in own if case.row in other]
    if pairs:
        extra |= _difference("difference", [(a.correct, b.correct) for a, b in pairs])
        worded = [
            (a.figures["f1"], b.figures["f1"]) for a, b in pairs if "f1" in a.figures and "f1" in b.figures
        ]
        extra |= _difference("f1_difference", worded)
        explained = [
            (a.figures[EXPLAINED], b.figures.get(EXPLAINED, b.correct))
            for a, b in pairs
            if EXPLAINED in a.figures and (EXPLAINED in b.figures or not b.method.startswith(SPECULATIVE))
        ]
        extra |= _difference("with_rationale_difference", explained)
        times = [(a.seconds, b.seconds) for a, b in pairs if a.seconds and b.seconds]
        if len(pairs) < len(own):
            extra["paired"] = len(pairs)
        if times:
            speedup = overall_speedup([PairedTimes(baseline=[b], method=[a]) for a, b in times])
            mine, theirs = fmean(a for a, _ in times), fmean(b for _, b in times)
            extra["latency_change_percent"] = 100 * (mine / theirs - 1)
    seconds = [case.seconds for case in own if case.seconds]
    if seconds:
        extra |= {
            "mean_ms": _MILLISECONDS * fmean(seconds),
            "p95_ms": _MILLISECONDS * float(np.percentile(seconds, 95)),
        }
    names = dict.fromkeys(name for case in own for name in case.figures)
    for name in names:
        extra[name] = fmean(case.figures[name] for case in own if name in case.figures)
    measurement = context.measurement(
        task=task,
        method=method,
        n=len(own),
        model=model,
        dtype=context.dtype,
        simulated=task.startswith(SEPARATE),
        extra=extra,
    )
    return replace(
        measurement,
        accuracy=fmean(correct),
        baseline=baseline[0].method if pairs and baseline else None,
        speedup=None if speedup is None else speedup.value,
        speedup_low=None if speedup is None else speedup.low,
        speedup_high=None if speedup is None else speedup.high,
    )


def _by_label(own: Sequence[Case]) -> dict[str, Extra]:
    """What a model that always names the commonest label gains nothing by; of one set, whose labels are the same."""
    labelled = [(case.gold, case.said) for case in own if case.gold is not None]
    gold = [right for right, _ in labelled]
    if (
        len(labelled) < len(own)
        or len(set(gold)) < 2
        or len({case.row.partition(" ")[0] for case in own}) > 1
    ):
        return {}
    balanced, matthews = label_figures(gold, [label for _, label in labelled])
    return {"balanced_accuracy": balanced, "matthews": matthews}


def label_figures(gold: Sequence[str], said: Sequence[str | None]) -> tuple[float, float]:
    """Of labels: the mean recall of those that are right somewhere, and Matthews' correlation."""
    from sklearn.metrics import matthews_corrcoef, recall_score  # a second to import

    recall = recall_score(gold, said, labels=sorted(set(gold)), average="macro", zero_division=0.0)
    return float(recall), float(matthews_corrcoef(gold, said))


def _difference(name: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Extra]:
    """A paired difference in percentage points with its interval; nothing without pairs."""
    if not pairs:
        return {}
    found = paired_bootstrap([a for a, _ in pairs], [b for _, b in pairs])
    return {
        f"{name}_points": 100 * found.difference,
        f"{name}_low": 100 * found.low,
        f"{name}_high": 100 * found.high,
    }
