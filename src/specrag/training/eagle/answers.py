"""The target's own answers, which a head learns to predict; one JSON line each, so that a stopped run can be resumed.

A target's text is easier to predict than human text, and it is what the head will have to predict.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from specrag.errors import SpecragError
from specrag.language_model import LanguageModel
from specrag.request import Prompt
from specrag.training.eagle.prompts import Conversation
from specrag.training.eagle.run import DataSettings
from specrag.training.files import LineFile

#: Conversations held at the same time.
BATCH = 128


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and the target's answer.

    Attributes:
        id: the conversation's id, a slash and the number of the turn.
        prompt, answer: token ids; a stop token is part of the answer.
        greedy: whether every token of the answer is the target's likeliest.
    """

    id: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    greedy: bool


class AnswerStore:
    """The answers in a file, which is read on construction.

    Args:
        path: JSON lines; created when the first answer is added. An incomplete last line, left by a kill, is cut off.

    Raises:
        SpecragError: a line before the last is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path, "answers")
        self.answers: dict[str, Answer] = {}
        for number, line in enumerate(self._file.lines, 1):
            try:
                answer = Answer(
                    str(line["id"]), tuple(line["prompt"]), tuple(line["answer"]), bool(line["greedy"])
                )
            except (TypeError, KeyError):
                raise SpecragError(f"line {number} of {str(path)!r} is damaged: take another --out") from None
            self.answers[answer.id] = answer

    @property
    def tokens(self) -> int:
        """Tokens of all answers, prompts not counted."""
        return sum(len(answer.answer) for answer in self.answers.values())

    def add(self, answers: Sequence[Answer]) -> None:
        """Append answers; they are on the disk when this returns.

        Raises:
            SpecragError: the disk refuses.
        """
        self._file.add([json.dumps(asdict(answer)) for answer in answers])
        self.answers.update((answer.id, answer) for answer in answers)


def make_answers(
    llm: LanguageModel,
    conversations: Sequence[Conversation],
    store: AnswerStore,
    settings: DataSettings,
    proceed: Callable[[int], bool],
) -> bool:
    """Let the target answer until there are ``settings.tokens`` tokens or everything is answered.

    Prompts that leave no room for an answer in ``settings.length`` are skipped.

    Args:
        conversations: in the order in which they are asked.
        store: gets the answers; those that it already holds are not made again.
        proceed: called with the number of tokens so far; returns whether to go on.

    Returns:
        Whether everything was done.
    """
    for start in range(0, len(conversations), BATCH):
        if store.tokens >= settings.tokens:
            return True
        if not proceed(store.tokens):
            return False
        batch = conversations[start : start + BATCH]
        _answer(llm, {f"{each.id}/1": each.opening for each in batch}, batch, store, settings)
        again = [each for each in batch if each.follow_up and f"{each.id}/1" in store.answers]
        messages = {f"{each.id}/2": _messages(llm, each, store.answers[f"{each.id}/1"]) for each in again}
        _answer(llm, messages, again, store, settings)
    return True


def _messages(llm: LanguageModel, asked: Conversation, first: Answer) -> list[Mapping[str, str]]:
    return [
        {"role": "user", "content": asked.opening},
        {"role": "assistant", "content": llm.tokenizer.decode(first.answer)},
        {"role": "user", "content": asked.follow_up},
    ]


def _answer(
    llm: LanguageModel,
    prompts: Mapping[str, Prompt],
    asked: Sequence[Conversation],
    store: AnswerStore,
    settings: DataSettings,
) -> None:
    """Answer the prompts that are not answered yet: first greedy ones, then sampled ones."""
    for greedy in (True, False):
        waiting = {
            id: llm.encode(prompt)
            for (id, prompt), each in zip(prompts.items(), asked, strict=True)
            if each.greedy == greedy and id not in store.answers
        }
        if not waiting:
            continue
        room = settings.length - settings.answer_tokens
        fitting = {id: tokens for id, tokens in waiting.items() if len(tokens) <= room}
        generations = llm.batch(
            list(fitting.values()),
            method="plain",
            max_tokens=settings.answer_tokens,
            temperature=0.0 if greedy else settings.temperature,
            seed=settings.seed + int(asked[0].id),  # draws are keyed by position, so a batch shares them
        )
        made = [
            Answer(id, tuple(tokens), tuple(token.token for token in generation.tokens), greedy)
            for (id, tokens), generation in zip(fitting.items(), generations, strict=True)
        ]
        if made:
            store.add(made)
