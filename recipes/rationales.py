"""Rationales for rows, by a strong model (Speculative RAG, section 3.2), kept if the answer follows from them.

The paper (Speculative RAG, Appendix G) does not print its prompt; this one is ours. A rationale stands in for passages
that the verifier does not see, so it has to quote them and to contain the answer by itself.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.answers.passage_reading import choose
from recipes.question_prompts import Rejected, contains_phrase
from recipes.rows import RowRun, Status, write_texts
from specrag.bench.metrics import contains_answer, normalize_answer
from specrag.errors import InputError
from specrag.methods.speculative_rag.form import LEAD, MalformedDraft, read_draft, write_draft
from specrag.methods.speculative_rag.task import Task, TaskKind, listed
from specrag.models.roles import TextGenerator, TextRequest
from specrag.retrieval.passage import Passage, passage_text
from specrag.training.drafter.rows import DrafterRow

CHECK_LEAD = "Answer:"
_RATIONALE_TOKENS = 80
_ANSWER_TOKENS: Mapping[TaskKind, int] = {"free-form": 24, "multiple-choice": 12, "claim-checking": 12}

_ASK = (
    "The right answer is known. Write the rationale: one or two sentences that quote what the passages say and from "
    "which the answer follows. Name what they are about. Do not speak of passages, options or labels."
)
_CHECKS: Mapping[TaskKind, str] = {
    "free-form": "Answer the question from the note alone, in a few words. If it does not tell, answer: unknown",
    "multiple-choice": "Choose the option that the note gives. Answer with its letter; if it gives none: unknown",
    "claim-checking": "Check the claim against the note alone. Answer with one of %s.",
}


def rationale_request(row: DrafterRow, passages: Sequence[Passage]) -> TextRequest:
    """Ask for a rationale for a row's answer from some of its passages."""
    messages = []
    for shown in _SHOWN[row.task.kind]:
        messages.append({"role": "user", "content": _asked(shown.task, shown.written, shown.passages)})
        messages.append({"role": "assistant", "content": f"{LEAD} {shown.rationale}"})
    written = _said(row)
    messages.append({"role": "user", "content": _asked(row.task, written, passages)})
    return TextRequest(
        messages,
        lead=LEAD,
        max_tokens=_RATIONALE_TOKENS,
        stop=("\n",),
        references=tuple(passage.text for passage in passages),
    )


def _asked(task: Task, written: str, passages: Sequence[Passage]) -> str:
    texts = [passage_text(passage.title, passage.text.strip()) for passage in passages]
    return "\n\n".join([*texts, _ASK, f"{task.asked}\nRight answer: {written}"])


def _said(row: DrafterRow) -> str:
    """The answer, and for a label also what it means."""
    label = normalize_answer(row.answer)
    if row.task.kind != "claim-checking":
        return row.task.written(row.answer)
    return f"{row.answer} ({_MEANINGS[label]})" if label in _MEANINGS else row.answer


_YES = "the passages say so"
_NO = "the passages say something else"
_UNKNOWN = "the passages do not say it"
_MEANINGS: Mapping[str, str] = {
    **dict.fromkeys(("true", "supported", "supports", "yes", "correct"), _YES),
    **dict.fromkeys(("false", "refuted", "refutes", "no", "incorrect"), _NO),
    **dict.fromkeys(("not enough information", "not enough info", "unknown"), _UNKNOWN),
}

_POINTS_BACK = re.compile(
    r"\b(?:passages?|options?|labels?|right answer|correct answer|the answer)\b", re.IGNORECASE
)
_FEWEST_WORDS = 4
#: How a model begins although it was asked not to; the rest is a rationale.
_SAYS = re.compile(
    r"^(?:the|this) passage (?:\w+ly )?(?:states?|says?|mentions?|tells(?: us)?|describes?|explains?|notes?) that ",
    re.IGNORECASE,
)
#: Share of a rationale's longer words that must occur in the passages; a claim may be contradicted in its own words.
_QUOTED = 0.8


def read_rationale(row: DrafterRow, passages: Sequence[Passage], text: str, *, cut: bool) -> str | Rejected:
    """The rationale written after :data:`~specrag.methods.speculative_rag.form.LEAD`, if it is one.

    Args:
        passages: the passages that the writer was shown.
        cut: whether the text ended because of its length; then only its whole sentences are kept.
    """
    rationale = " ".join(text.split("\n", 1)[0].split())
    if cut:
        ends = [found.end() for found in re.finditer(r"[.!?](?=\s|$)", rationale)]
        rationale = rationale[: ends[-1]] if ends else ""
    bare = _SAYS.sub("", rationale)
    rationale = bare if bare == rationale else bare[:1].upper() + bare[1:]
    if len(rationale.split()) < _FEWEST_WORDS:
        return Rejected("no rationale")
    unknown = _MEANINGS.get(normalize_answer(row.answer)) == _UNKNOWN
    if not unknown and _POINTS_BACK.search(rationale):
        return Rejected("it speaks of passages, options or the answer")
    shown = " ".join(f"{passage.title} {passage.text}" for passage in passages)
    claim = row.task.text if row.task.kind == "claim-checking" else ""
    known = _words(f"{shown} {claim}")
    words = [word for word in _words(rationale) if len(word) > 3]
    if not unknown and sum(word in known for word in words) < _QUOTED * len(words):
        return Rejected("it does not quote the passages")
    return rationale


def _words(text: str) -> set[str]:
    """Normalised words, without a possessive ending."""
    return set(normalize_answer(re.sub(r"['\u2019]s\b", "", text)).split())


def check_request(row: DrafterRow, rationale: str) -> TextRequest:
    """Ask the question again, to be answered from the rationale only."""
    task = row.task
    check = _CHECKS[task.kind]
    if task.kind == "claim-checking":
        check %= listed(task.labels)
    messages = [{"role": "user", "content": f"Note: {rationale}\n\n{task.asked}\n\n{check}"}]
    return TextRequest(messages, lead=CHECK_LEAD, max_tokens=_ANSWER_TOKENS[task.kind], stop=("\n",))


def follows(row: DrafterRow, text: str) -> bool:
    """Whether the answer given from the rationale alone is the row's answer."""
    if row.task.kind == "free-form":
        return contains_answer(text, row.answer) and contains_phrase(text, row.answer)
    return choose(row.task, text.strip()) == row.answer


@dataclass(frozen=True, slots=True)
class _Shown:
    """An example task with its rationale, to show the form; written for this project."""

    task: Task
    written: str
    passages: Sequence[Passage]
    rationale: str


def _passage(number: int, title: str, text: str) -> Passage:
    return Passage(number, "example", title, "", text, {})


_PASSAGES = (
    _passage(
        0,
        "Harbours of the north",
        "Many harbours of the coast freeze in winter, and their light houses are dark then.",
    ),
    _passage(
        1,
        "Tarn Light",
        "Tarn Light is a lighthouse on the island of Ruun. It was designed by Elke Vorst and built in 1888 from red "
        "granite. Its lamp can be seen from 40 kilometres away.",
    ),
)
_QUOTE = "Tarn Light, a lighthouse on the island of Ruun, was designed by Elke Vorst and built in 1888."
_QUESTION = "Who designed the lighthouse Tarn Light?"
_CLAIM = "The lighthouse Tarn Light was designed by %s."
_SHOWN: Mapping[TaskKind, Sequence[_Shown]] = {
    "free-form": (_Shown(Task(_QUESTION), "Elke Vorst", _PASSAGES, _QUOTE),),
    "multiple-choice": (
        _Shown(
            Task(_QUESTION, "multiple-choice", {"A": "Jon Malk", "B": "Elke Vorst", "C": "Ida Brenn"}),
            "B. Elke Vorst",
            _PASSAGES,
            _QUOTE,
        ),
    ),
    "claim-checking": (
        _Shown(
            Task(_CLAIM % "Jon Malk", "claim-checking", labels=("True", "False")),
            f"False ({_NO})",
            _PASSAGES,
            "Tarn Light, a lighthouse on the island of Ruun, was designed by Elke Vorst, not by Jon Malk.",
        ),
        _Shown(
            Task(_CLAIM % "Elke Vorst", "claim-checking", labels=("True", "False")),
            f"True ({_YES})",
            _PASSAGES,
            _QUOTE,
        ),
    ),
}


@dataclass(frozen=True, kw_only=True)
class RationaleSettings:
    """How rationales are written.

    Args:
        passages: most passages of a row; each row gets a drawn number, from just its evidence up to this many.
        all_passages: show the writer all of them; otherwise only the evidence, if there is any, which is faster.
        check: keep a rationale only if the writer gives the answer from it alone.
        batch: rows written at the same time.
        seed: of the passages drawn and of their order.

    Raises:
        InputError: a value is out of range.
    """

    passages: int = 5
    all_passages: bool = False
    check: bool = True
    batch: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("passages", "batch"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "give at least 1")
        if self.seed < 0:
            raise InputError("seed", self.seed, "give at least 0")


def write_rationales(
    writer: TextGenerator,
    rows: Sequence[DrafterRow],
    out: Path,
    settings: RationaleSettings,
    *,
    command: str = "",
    show: Callable[[Status], None] = lambda _: None,
) -> RowRun:
    """Write a rationale for each row. The same call resumes a run; rows may have been added meanwhile.

    Args:
        writer: writes rationales, and answers from what it wrote.
        out: a folder; created if needed. Each batch is on the disk before the next begins.
        command: for the card.
        show: called with the run's status.

    Raises:
        InputError: the folder was begun with other settings, or with another row of the same id.
        SpecragError: the writer fails, or the disk refuses; what was made is kept.
    """
    noted = {"writer": writer.name}
    noted |= {name: getattr(settings, name) for name in ("passages", "all_passages", "check", "seed")}
    run = RowRun.open(out, noted, command=command)
    _check_same_rows(rows, run)
    tried = run.tried
    for start in range(0, len(rows), settings.batch):
        show(run.status("rationales", len(rows)))
        batch = [row for row in rows[start : start + settings.batch] if row.identifier not in tried]
        if batch:
            with run.batch():
                _write_batch(writer, batch, settings, run)
    show(run.status("rationales", len(rows)))
    return run


def _check_same_rows(rows: Sequence[DrafterRow], run: RowRun) -> None:
    given = {row.identifier: row for row in rows}
    for made in run.rows:
        row = given.get(made.identifier)
        if row is not None and (row.task, row.answer) != (made.task, made.answer):
            remedy = "it was begun with another row of this id; take another --out"
            raise InputError("--out", f"{run.out}: {made.identifier}", remedy)


def _write_batch(
    writer: TextGenerator, rows: Sequence[DrafterRow], settings: RationaleSettings, run: RowRun
) -> None:
    dealt = [choose_passages(row, settings) for row in rows]
    shown = [_shown(row, settings) for row in dealt]
    texts = write_texts(writer, [rationale_request(*pair) for pair in zip(dealt, shown, strict=True)])
    read: list[DrafterRow] = []
    for row, passages, text in zip(dealt, shown, texts, strict=True):
        found = read_rationale(row, passages, text.text, cut=text.finish_reason == "length")
        if isinstance(found, Rejected):
            run.reject(row.identifier, found.reason, text.text)
        elif isinstance(draft := read_draft(row.task, write_draft(found, row.answer)), MalformedDraft):
            run.reject(row.identifier, f"not in the form of a draft: {draft.reason}", found)
        else:
            read.append(replace(row, rationale=found))
    kept = read
    if settings.check:
        checks = write_texts(writer, [check_request(row, row.rationale or "") for row in read])
        kept = []
        for row, text in zip(read, checks, strict=True):
            if follows(row, text.text):
                kept.append(row)
            else:
                said = f"{row.rationale} | {row.answer} | {text.text.strip()}"
                run.reject(row.identifier, "the answer does not follow from it", said)
    run.add(kept)


def choose_passages(row: DrafterRow, settings: RationaleSettings) -> DrafterRow:
    """The row with some of its passages: the evidence and others drawn at random, in random order."""
    draws = random.Random(f"{settings.seed}/{row.identifier}/passages")
    evidence = list(row.evidence)
    others = [passage for passage in row.passages if passage not in evidence]
    most = max(settings.passages, len(evidence), 1)
    least = max(len(evidence), 1)
    wanted = draws.randint(least, max(least, min(most, len(row.passages))))
    dealt = evidence + draws.sample(others, min(wanted - len(evidence), len(others)))
    draws.shuffle(dealt)
    return replace(row, passages=tuple(dealt))


def _shown(row: DrafterRow, settings: RationaleSettings) -> Sequence[Passage]:
    return row.passages if settings.all_passages or not row.evidence else row.evidence
