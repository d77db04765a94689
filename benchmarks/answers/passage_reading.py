"""Answering from passages in one prompt, for every kind of task: what Speculative RAG is compared with.

The paper's prompts (Appendix I) are not printed; these are ours. For questions in free form the instruction prompt is
that of :class:`~specrag.StandardRAG`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from specrag.engine.passes import Coroutine
from specrag.errors import ContextLengthError, InputError
from specrag.methods.prompts import INSTRUCTION, LEAD, build_prompt
from specrag.methods.speculative_rag.task import Task, TaskKind, listed, plain
from specrag.models.roles import GeneratedText, TextGenerator, TextPrompt, TextRequest
from specrag.retrieval.passage import Passage, passage_text

#: ``instruction``: a turn of a chat, for tuned models (Figure 8). ``plain``: a text to go on with (Figure 7).
PromptForm: TypeAlias = Literal["instruction", "plain"]
PROMPT_FORMS: tuple[PromptForm, ...] = get_args(PromptForm)

_INSTRUCTIONS: Mapping[TaskKind, str] = {
    "free-form": INSTRUCTION,
    "multiple-choice": "Answer with the letter of the right option; the passages above may help.",
    "claim-checking": "Check the claim against the passages above. Answer with %s and nothing else.",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """An answer from passages.

    Attributes:
        text: as written, with what it was made to begin with.
        answer: the letter or the label that the text names; the text where the task has none; empty if it names none.
        kept: numbers of the passages in the prompt, from 1.
        prompt_tokens, read_tokens, completion_tokens: of the generator.
        judged_tokens: tokens that were read to judge passages or answers.
    """

    text: str
    answer: str
    kept: tuple[int, ...]
    prompt_tokens: int
    read_tokens: int
    completion_tokens: int
    judged_tokens: int = 0


class PassageReading:
    """Standard RAG as a coroutine over any generator, local or an endpoint.

    Args:
        generator: reads and answers.
        form: of :data:`PROMPT_FORMS`.
        max_tokens: of the answer.

    Raises:
        InputError: a value cannot be used.
    """

    def __init__(
        self, generator: TextGenerator, *, form: PromptForm = "instruction", max_tokens: int = 100
    ) -> None:
        if form not in PROMPT_FORMS:
            raise InputError("form", form, f"take one of {', '.join(PROMPT_FORMS)}")
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise InputError("max_tokens", max_tokens, "give an integer from 1 upwards")
        self.generator = generator
        self.form: PromptForm = form
        self.max_tokens = max_tokens

    def answering(self, task: Task, passages: Sequence[Passage]) -> Coroutine[Reading]:
        """A coroutine that answers from the passages; the last ones are left out if they do not fit.

        Raises:
            InputError: there are no passages.
            ContextLengthError: the best passage does not fit.
        """
        if not passages:
            raise InputError("passages", [], "give at least one passage")
        kept = self._fit(task, passages)
        request = self.request(task, passages[:kept])
        (text,) = yield from self.generator.generating([request])
        return self.read(task, request, text, tuple(range(1, kept + 1)))

    def read(self, task: Task, request: TextRequest, text: GeneratedText, kept: tuple[int, ...]) -> Reading:
        """What was answered from the passages with these numbers."""
        said = f"{request.lead}{text.text}".strip()
        return Reading(said, choose(task, said), kept, text.prompt_tokens, text.read_tokens, len(text.tokens))

    def request(self, task: Task, passages: Sequence[Passage]) -> TextRequest:
        """What the generator is asked."""
        quoted = tuple(passage.text for passage in passages)
        if self.form == "plain":
            texts = [passage_text(passage.title, passage.text.strip()) for passage in passages]
            prompt: TextPrompt = "\n\n".join([*texts, f"{task.asked}\nAnswer:"])
            return TextRequest(prompt, "", self.max_tokens, stop=("\n",), references=quoted)
        instruction = _INSTRUCTIONS[task.kind]
        if task.kind == "claim-checking":
            instruction %= listed(task.labels)
        if task.kind == "free-form":
            messages = build_prompt(task.text.strip(), passages, instruction=instruction)
            return TextRequest(messages, LEAD, self.max_tokens, references=quoted)
        asked = "\n\n".join(
            [*(passage_text(p.title, p.text.strip()) for p in passages), f"{instruction}\n{task.asked}"]
        )
        return TextRequest([{"role": "user", "content": asked}], "", self.max_tokens, references=quoted)

    def _fit(self, task: Task, passages: Sequence[Passage]) -> int:
        """How many of the passages fit."""
        limit = self.generator.context_length
        kept = len(passages)
        while limit is not None:
            request = self.request(task, passages[:kept])
            if self.generator.count(request.prompt, request.lead) + self.max_tokens <= limit:
                break
            kept -= 1
            if not kept:
                remedy = "the best passage and the question do not fit the model's context; shorten them"
                raise ContextLengthError("passages", passages[0].title, remedy)
        return kept


def choose(task: Task, text: str) -> str:
    """The option or label that an answer names first; the text itself where the task has none of either.

    More lenient than the reading of drafts, since nothing keeps these answers to a form. Empty if none is named.
    """
    if task.kind == "free-form":
        return text
    if task.kind == "multiple-choice":
        letters = "".join(re.escape(letter) for letter in task.options)
        # A letter alone, or marked as one; "A" may also be a word.
        found = (
            re.match(rf"\W*([{letters}])(?=\s*$|[.):,\n])", text)
            or re.match(rf"\W*(?![AI])([{letters}])(?=\s)", text)
            or re.search(
                rf"\(([{letters}])\)|\b([{letters}])[.):](?=\s|$)|(?:answer|option) is:? \(?([{letters}])\b",
                text,
            )
        )
        if found is not None:
            return next(group for group in found.groups() if group)
        return _first_named(task.options, text)
    return _first_named({label: label for label in task.labels}, text)


def _first_named(names: Mapping[str, str], text: str) -> str:
    """The key of the text that is named first; of two at one place the longer one. What is denied is not named."""
    said = f" {plain(text)} "
    places = []
    for key, name in names.items():
        found = re.search(rf"(?<! not)(?<!n t) {re.escape(plain(name))} ", said)
        if found is not None:
            places.append((found.start(), -len(name), key))
    return min(places)[2] if places else ""
