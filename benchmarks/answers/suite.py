"""``specrag bench answers``: how many questions are answered rightly from passages, and how fast.

A question costs half a minute to two by all methods of two configurations, the ablations as much again (two cores,
nothing else running, single runs). So the first round, two questions a set with all ablations, takes half an hour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.answers import pictures
from benchmarks.answers.data import ROWS, SIZES, Question, load_sets
from benchmarks.answers.figures import (
    PLAIN,
    REMEDIED,
    SCORES,
    SEPARATOR,
    SPECULATIVE,
    STANDARD,
    cases,
    grouped,
    pooled,
    separated,
    summarise,
    tuning,
    unchanged,
)
from benchmarks.answers.trials import (
    ONE_DRAFT,
    Models,
    Pair,
    Setting,
    changed,
    corrective,
    reflective,
    speculative,
    standard,
)
from specrag.bench.interleave import Plan, Row, Trial
from specrag.bench.measurement import Measurement
from specrag.bench.suite import BenchContext
from specrag.methods.speculative_rag.scoring import DEFAULT_STATEMENT, STATEMENTS
from specrag.models.adapters import shipped_adapters

#: The verifier of the full run, and the second configuration's drafter as well.
VERIFIER = "qwen2.5-coder-1.5b"

CORRECTIVE, REFLECTIVE = f"{STANDARD}+corrective", f"{STANDARD}+reflective"
ONE = f"{SPECULATIVE}+one-draft"

#: What a draft reads, read by the model that answers in earnest: what subsets and a verdict have to be better than.
TWO_BEST = f"{STANDARD}+two-best"

#: Rows of each set that are done when a round ends, and how many of them with the ablations, which take longest. Every
#: table has its first figures after the first round; ``--repeats N`` ends after N rounds, and a later run goes on from
#: there.
ROUNDS = ((2, 2), (5, 2), (8, 2), (12, 4), (20, 5), (35, 10), (50, 20), (75, 35), (ROWS, 50))
_QUICK_SETS = ("popqa", "arc-challenge", "healthver")

Make = Callable[[Question, Models], Trial]


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """Settings that are compared on some sets.

    Args:
        section: of the page.
        settings: by variant.
    """

    section: str
    sets: tuple[str, ...]
    settings: Mapping[str, Setting]


_SINGLE = ("triviaqa", "healthver")  # the paper's
# TriviaQA's passages seldom hold the answer, so that no setting can show there what it does.
_EASIER = ("popqa", *_SINGLE)
ABLATIONS = (
    Ablation(
        section="sampling",
        sets=(*_EASIER, "musique", "hotpotqa"),
        settings={
            "random": changed(strategy="random"),
            "same-cluster": changed(strategy="same-cluster"),
        },
    ),
    Ablation(
        section="evidence",
        sets=_EASIER,
        settings={
            "passages": changed(evidence="passages"),
            "both": changed(evidence="both"),
        },
    ),
    Ablation(
        section="drafts",
        sets=(*_EASIER, "hotpotqa"),
        settings={f"m={m}": Setting(m=m) for m in (1, 5, 10, 15, 20)},
    ),
    Ablation(
        section="passages",
        sets=(*_EASIER, "hotpotqa"),
        settings={f"k={k}": Setting(k=k) for k in (1, 2, 4, 6, 10)},
    ),
    Ablation(
        section="statement",
        sets=_EASIER,
        settings={name: changed(statement=name) for name in STATEMENTS if name != DEFAULT_STATEMENT},
    ),
    Ablation(section="drafting", sets=_EASIER, settings={"adaptive": changed(decoder="adaptive")}),
)

#: What the paper does not have and might mend what goes wrong with small models: one at a time for the first
#: configuration, all together for the others as well.
_TOGETHER = {"anchored-whole+all-read": changed(strategy="anchored-whole", evidence="all-passages")}
REMEDIES: Mapping[str, Setting] = {
    "anchored": changed(strategy="anchored"),
    "anchored-whole": changed(strategy="anchored-whole"),
    "all-read": changed(evidence="all-passages"),
    **_TOGETHER,
}


class AnswersSuite:
    """Answers from each question's own passages, by every method."""

    name = "answers"
    summary = (
        "Questions, multiple choices and claims, answered greedily from the passages that come with them, one after "
        "the other. Free text is right if it contains a gold answer, both normalised as SQuAD's script does; a choice "
        "if it is the gold one. `standard-rag` reads all passages with one model; questions in free form are asked "
        "for with citations, `plain-prompt` goes on with bare text. `corrective` reads the passages that the "
        "drafter's model grades as helpful, `reflective` answers from each of the first 5 and takes the answer that "
        "is judged best; neither model is trained for it. `speculative-rag` is drafter + verifier with the paper's m "
        "and k for the set; `one-draft` is the drafter on all passages, `drafter-alone` takes the draft that the "
        "drafter is surest of, `random-draft` any, `oracle` a right one if there is one (their times are the same "
        "run's, without what they do not need). `difference points` is accuracy against the better of the verifier "
        "model's two standard prompts on the same questions, in percentage points with the 95 % interval of a paired "
        "bootstrap; the speed-up and `latency change percent` are against the same. A long text (`answer words`) "
        "contains a gold answer more easily than a short one, so free text has SQuAD's `f1` too, and its paired "
        "difference, and both of its first sentence; of claims `balanced accuracy` is the mean recall of the labels, "
        "`matthews` Matthews' correlation. `two-best` reads the first two passages alone. `right with "
        "rationale` takes a draft's answer and rationale for its text, which makes it about as "
        "long as a standard one, `oracle with rationale` any draft's. Tokens read are means a question. "
        "`drafts that saw the answer` is the share of drafts whose passages hold a gold answer, which a claim has not "
        "and a choice need not. `scores` judges the same drafts by other scorings; `mean` is the mean log-probability "
        "a token, `product` the paper's product; `voted` adds up the drafts of an answer, and `ranked` counts the "
        "reciprocal ranks of a draft's passages as well. Passages that come in no order are ranked by their "
        "similarity with the question. `remedies` are not the paper's: `anchored` gives the first passage to every "
        "draft, `anchored-whole` one draft all of them, `all-read` lets the verifier read all passages once in front "
        "of the answers. `drafts`, `passages`, `sampling`, "
        "`evidence`, `statement` and `drafting` change one setting of the first configuration, with the tuned drafter "
        "where one comes with specrag, on fewer questions; what is not changed stands beside it on the same ones. "
        "`separate machines` models what a machine for each draft would save. A drafter with an adapter bears its "
        "name and the beginning of a SHA-256 of its files; `tuning` compares it, by each method, with the model as it "
        "comes. HealthVer's claims are those whose evidence leans to one side; Climate-FEVER's without the disputed "
        "ones; ARC's evidence is cut into passages of two sentences."
    )

    def run(self, context: BenchContext) -> Iterator[Measurement]:
        sets = _sets(context)
        models = Models(context.device, context.dtype)
        pairs = _pairs(context)
        verifier = pairs[0].verifier
        rows = list(_rows(context, sets, pairs, models))
        try:
            # Models are warm when they are loaded; a method's first run on a row is the one that counts.
            # A question has rows of several models in a task; `--rows` has chosen among the questions.
            records = replace(context, rows=None).measure("answers", rows, Plan(repeats=1, warmups=0))
        finally:
            models.close()
        asked = {f"{q.set} {q.identifier}": q for questions in sets.values() for q in questions}
        found = cases(records, asked)
        found += unchanged(found, (*(ablation.section for ablation in ABLATIONS), REMEDIED))
        groups = {row: question.group for row, question in asked.items()}
        found = pooled(pooled(found, REMEDIED, sets), SCORES, _SINGLE)
        yield from summarise(context, [*found, *grouped(found, groups), *separated(found)], verifier)
        tuned = [pair.label for pair in pairs if pair.adapter is not None]
        yield from tuning(context, found, pairs[0].label, tuned)

    def pictures(self, measurements: Sequence[Measurement], folder: Path) -> Sequence[Path]:
        """Accuracy over m and k, and rationales beside passages."""
        return pictures.draw(measurements, folder)


def suite() -> AnswersSuite:
    """The suite, for the registry."""
    return AnswersSuite()


def _sets(context: BenchContext) -> dict[str, list[Question]]:
    names = _QUICK_SETS if context.quick else [name for name in SIZES if name != "sample"]
    return load_sets(context.data, names, 1 if context.quick and context.data else context.rows or ROWS)


def _pairs(context: BenchContext) -> tuple[Pair, ...]:
    """``--model`` is the first configuration's drafter: as it comes, and with the adapters that were made of it."""
    verifier = context.model if context.quick else VERIFIER
    untuned = Pair(drafter=context.model, verifier=verifier)
    if context.adapters or context.quick:
        return (untuned, *_tuned(untuned, context.adapters))
    tuned = _tuned(untuned, shipped_adapters(context.model))
    return tuple(dict.fromkeys((untuned, *tuned, Pair(drafter=VERIFIER, verifier=VERIFIER))))


def _tuned(pair: Pair, adapters: Iterable[Path]) -> list[Pair]:
    return [replace(pair, adapter=folder) for folder in adapters]


def _rows(
    context: BenchContext, sets: Mapping[str, Sequence[Question]], pairs: Sequence[Pair], models: Models
) -> Iterator[Row]:
    """Round by round, set by set, question by question: everything about a question beside each other.

    If drafters are compared (``--adapter``) it is they alone, beside what they are measured against.
    """
    ablated = next((pair for pair in pairs if pair.adapter is not None), pairs[0])
    done, done_ablated = 0, 0
    for end, end_ablated in ROUNDS[: context.repeats]:
        for questions in sets.values():
            for question in questions[done:end]:
                if context.adapters:
                    yield _standard(question, pairs[0].verifier, models)
                    yield from (
                        _row(question, pair.label, question.set, _drafted(pair), models) for pair in pairs
                    )
                else:
                    yield from _everything(question, pairs, models)
                    yield _changed(question, ablated, REMEDIED, REMEDIES, models)
                    equal = [pair for pair in pairs if pair.drafter == pair.verifier and pair != ablated]
                    for pair in equal:
                        yield _changed(question, pair, REMEDIED, _TOGETHER, models)
            if not (context.quick or context.adapters):
                for question in questions[done_ablated:end_ablated]:
                    yield from _ablated(question, ablated, models)
        done, done_ablated = end, end_ablated


def _everything(question: Question, pairs: Sequence[Pair], models: Models) -> Iterator[Row]:
    for name in dict.fromkeys(model for pair in pairs for model in (pair.drafter, pair.verifier)):
        yield _standard(question, name, models)
    for pair in pairs:
        makes = _drafted(pair)
        if pair.adapter is None:  # what is trained to draft does nothing else
            makes[CORRECTIVE] = lambda q, m, pair=pair: corrective(q, pair, m)  # type: ignore[misc]
        if pair == pairs[0]:  # reads with the verifier's model alone, which all configurations share
            makes[REFLECTIVE] = lambda q, m, pair=pair: reflective(q, pair.verifier, m)  # type: ignore[misc]
        yield _row(question, pair.label, question.set, makes, models)


def _standard(question: Question, name: str, models: Models) -> Row:
    makes: dict[str, Make] = {
        STANDARD: lambda q, m: standard(q, name, m, "instruction"),
        PLAIN: lambda q, m: standard(q, name, m, "plain"),
        TWO_BEST: lambda q, m: standard(replace(q, passages=q.passages[:2]), name, m, "instruction"),
    }
    return _row(question, name, question.set, makes, models)


def _drafted(pair: Pair) -> dict[str, Make]:
    return {
        SPECULATIVE: lambda q, m: speculative(q, pair, m),
        ONE: lambda q, m: speculative(q, pair, m, ONE_DRAFT),
    }


def _ablated(question: Question, pair: Pair, models: Models) -> Iterator[Row]:
    size = SIZES[question.set]
    for ablation in ABLATIONS:
        if question.set in ablation.sets:
            others = {
                name: setting
                for name, setting in ablation.settings.items()
                if setting not in (Setting(m=size.m), Setting(k=size.k))  # the set's own stands beside it
            }
            yield _changed(question, pair, ablation.section, others, models)


def _changed(
    question: Question, pair: Pair, section: str, settings: Mapping[str, Setting], models: Models
) -> Row:
    makes: dict[str, Make] = {
        f"{SPECULATIVE}+{name}": lambda q, m, setting=setting: speculative(q, pair, m, setting)  # type: ignore[misc]
        for name, setting in settings.items()
    }
    return _row(question, pair.label, f"{section}/{question.set}", makes, models)


def _row(question: Question, model: str, task: str, makes: Mapping[str, Make], models: Models) -> Row:
    return Row(
        name=f"{model}{SEPARATOR}{question.identifier}",
        task=task,
        methods=tuple(makes),
        prepare=lambda: {name: make(question, models) for name, make in makes.items()},
    )
