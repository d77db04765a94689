"""Draft quality of a tuned drafter, measured in the engine with its weights merged, as at inference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specrag.bench import contains_answer
from specrag.engine import gather
from specrag.language_model import LanguageModel, load
from specrag.methods import LocalGenerator
from specrag.methods.speculative_rag.cited import says_not_here
from specrag.methods.speculative_rag.drafting import Drafting, Form, drafting
from specrag.methods.speculative_rag.result import Draft
from specrag.methods.speculative_rag.task import Task
from specrag.training.drafter.objective import Drafted
from specrag.training.drafter.rows import DrafterRow

_TOGETHER = 8  # drafts in memory at a time


def is_right(task: Task, draft: Draft, gold: str) -> bool:
    """Whether a draft's answer is right: it contains the gold answer, or equals the letter or label."""
    if draft.malformed is not None:
        return False
    return draft.answer == gold if task.choices else contains_answer(draft.answer, gold)


def count_drafts(llm: LanguageModel, rows: Sequence[DrafterRow], form: Form = "paper") -> Drafted:
    """Draft for rows, from all passages of each, greedily, as training teaches it.

    There is no example in the prompt, and drafts are not kept to the form. For cited drafts, if a row's passages do not
    hold the answer, a draft is right that says so.

    Raises:
        ContextLengthError: a question leaves no room for a passage.
    """
    writer = LocalGenerator(llm)
    settings = Drafting(example=False, steer=False, form=form)
    right = wrong = malformed = 0
    for start in range(0, len(rows), _TOGETHER):
        some = rows[start : start + _TOGETHER]
        coroutines = [
            drafting(writer, row.task, row.passages, [range(len(row.passages))], settings) for row in some
        ]
        written = llm.executor.run(llm.executor.submit(gather(coroutines)))
        for row, (one,) in zip(some, written, strict=True):
            if form == "cited" and row.task.kind == "free-form" and not row.evidence:
                right, wrong = (right + 1, wrong) if says_not_here(one.draft.text) else (right, wrong + 1)
            elif one.draft.malformed is not None:
                malformed += 1
            elif is_right(row.task, one.draft, row.answer):
                right += 1
            else:
                wrong += 1
    return Drafted(right, wrong, malformed)


def measure_drafts(
    model: str, folder: Path, rows: Sequence[DrafterRow], *, device: str, full: bool, form: Form = "paper"
) -> Drafted:
    """Load what was trained as a user would, in bf16, and draft with it.

    Args:
        model: the base model.
        folder: the adapter, or the model if all weights were trained.
        form: of the drafts.

    Raises:
        SpecragError: it cannot be loaded.
    """
    llm = load(folder, device=device) if full else load(model, device=device, adapter=folder)
    try:
        return count_drafts(llm, rows, form)
    finally:
        llm.close()
