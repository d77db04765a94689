"""Draft quality of a tuned drafter, measured in the engine with its weights merged as at inference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specrag.bench.metrics import contains_answer
from specrag.engine.passes import gather
from specrag.language_model import LanguageModel, load
from specrag.methods.generator import LocalGenerator
from specrag.methods.speculative_rag.drafting import Drafting, drafting
from specrag.methods.speculative_rag.result import Draft
from specrag.methods.speculative_rag.task import Task
from specrag.training.drafter.objective import Drafted
from specrag.training.drafter.rows import DrafterRow

#: Drafts as training teaches them: without an example in the prompt, and not kept to the form.
DRAFTING = Drafting(example=False, steer=False)
_TOGETHER = 8  # drafts in memory at a time


def is_right(task: Task, draft: Draft, gold: str) -> bool:
    """Whether a draft's answer is right: it holds the gold answer, or is the very letter or label."""
    if draft.malformed is not None:
        return False
    return draft.answer == gold if task.choices else contains_answer(draft.answer, gold)


def count_drafts(llm: LanguageModel, rows: Sequence[DrafterRow]) -> Drafted:
    """Draft for rows, from all passages of each, greedily.

    Raises:
        ContextLengthError: a question leaves no room for a passage.
    """
    writer = LocalGenerator(llm)
    right = wrong = malformed = 0
    for start in range(0, len(rows), _TOGETHER):
        some = rows[start : start + _TOGETHER]
        coroutines = [
            drafting(writer, row.task, row.passages, [range(len(row.passages))], DRAFTING) for row in some
        ]
        written = llm.executor.run(llm.executor.submit(gather(coroutines)))
        for row, (one,) in zip(some, written, strict=True):
            if one.draft.malformed is not None:
                malformed += 1
            elif is_right(row.task, one.draft, row.answer):
                right += 1
            else:
                wrong += 1
    return Drafted(right, wrong, malformed)


def measure_drafts(
    model: str, folder: Path, rows: Sequence[DrafterRow], *, device: str, full: bool
) -> Drafted:
    """Load what was trained as anybody would, in bf16, and draft with it.

    Args:
        model: the base model.
        folder: the adapter, or the model where all weights were trained.

    Raises:
        SpecragError: it cannot be loaded.
    """
    llm = load(folder, device=device) if full else load(model, device=device, adapter=folder)
    try:
        return count_drafts(llm, rows)
    finally:
        llm.close()
