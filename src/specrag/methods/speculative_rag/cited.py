"""Drafts that people can use: a sentence with its citations, as in standard RAG, and what it was taken from.

Small models answer better this way than in the paper's form (PopQA, SmolLM2, the same passages: 76 against 52 %). The
rationale is not the drafter's: it is the sentence of the cited passages that holds most of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from specrag.methods.citations import Support, find_citations
from specrag.methods.citing import CitedText
from specrag.methods.prompts import Message, build_prompt, is_small
from specrag.methods.speculative_rag.form import MalformedDraft, ParsedDraft, Span
from specrag.methods.speculative_rag.task import Task
from specrag.methods.wording import wording
from specrag.models import Reluctance, TextGenerator
from specrag.retrieval import Passage, passage_text

#: A citation as ``CitedText`` makes it; it leaves no other.
_MARK = re.compile(r"\[(\d{1,3})\]")
#: How a drafter that was trained on this form says that its passages do not hold the answer: none has the number 0.
_NOT_HERE = "0]"
#: How much surer it has to be of that than of a passage. Chosen on odd rows.
RELUCTANCE = Reluctance(_NOT_HERE, 2.0)
#: What is wrong with such a draft.
NOT_HERE = "it says that its passages do not hold the answer"
_SENTENCES = re.compile(r"(?<=[.!?])\s+|\n+")


def cited_prompt(task: Task, passages: Sequence[Passage]) -> tuple[Message, ...]:
    """The conversation that asks for a sentence; the answer begins with :func:`cited_lead`."""
    words = wording(task.text)
    return build_prompt(task.text, passages, instruction=words.instruction, label=words.question)


def cited_lead(task: Task, drafter: TextGenerator) -> str:
    """How a draft begins, if its drafter was trained that way or should choose a passage first; it is not shown."""
    return wording(task.text).lead if is_trained(drafter) or is_small(getattr(drafter, "llm", None)) else ""


def is_trained(drafter: TextGenerator) -> bool:
    """Whether a drafter was trained on this form."""
    loaded = getattr(getattr(drafter, "llm", None), "loaded", None)
    return getattr(loaded, "drafter_form", None) == "cited"


def write_cited(sentence: str, number: int | None) -> str:
    """A draft in the form, after the lead: what a drafter is trained to write.

    Args:
        number: of the passage that says it; ``None`` if none does.
    """
    return _NOT_HERE if number is None else f"{number}]: {' '.join(sentence.split())}"


def says_not_here(text: str) -> bool:
    """Whether a draft says, as it was trained to, that its passages do not hold the answer."""
    return text.lstrip().startswith(_NOT_HERE)


def read_cited(
    task: Task, text: str, passages: Sequence[Passage], numbers: Sequence[int], lead: str
) -> ParsedDraft | MalformedDraft:
    """Read what a drafter wrote after the lead: its first line. A sentence that no passage holds is not an answer.

    Args:
        passages: those that it read.
        numbers: of these among the sources, as given in the citations.
        lead: the beginning that it continued.
    """
    line = text.split("\n", 1)[0]
    if lead and says_not_here(line):
        return MalformedDraft(NOT_HERE)
    read = [passage_text(passage.title, passage.text) for passage in passages]
    said = CitedText(task.text, read, lead)
    said.push(line)
    said.end()
    answer = said.text.strip()
    if not answer:
        return MalformedDraft("it holds no sentence")
    citations = find_citations(answer, read)
    cited = citations.numbers
    if not cited:
        return MalformedDraft("none of its passages holds what it says")
    rationale = _held(task, answer, [read[number - 1] for number in cited])
    held = any(citation.supported for citation in citations.found)
    shown = _MARK.sub(lambda mark: f"[{numbers[int(mark[1]) - 1]}]", answer)
    used = tuple(sorted(numbers[own - 1] for own in cited))
    return ParsedDraft(rationale, shown, Span(0, 0), Span(0, len(line)), used, held)


def _held(task: Task, answer: str, sources: Sequence[str]) -> str:
    """The sentence of the sources that holds most of an answer."""
    sentences = [part.strip() for source in sources for part in _SENTENCES.split(source) if part.strip()]
    chosen = Support(task.text, sentences).choose(answer)
    return sentences[chosen[0] - 1] if chosen else sentences[0]
