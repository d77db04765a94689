"""Prompts for a chat model, made from passages of freely usable texts."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrag.bench import read_text
from specrag.errors import InputError
from specrag.retrieval.documents import Chunker, Document, SourceFile, find_files, read_file
from specrag.training.exclusion import SHARED_WORDS

#: Tokens of the longest passage.
PASSAGE_TOKENS = 200
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Passage:
    """A text; ``title`` is empty if the text does not name what it is about."""

    text: str
    title: str


@dataclass(frozen=True, slots=True)
class Sources:
    """What was read.

    Attributes:
        passages: in the order of the files.
        prompts: texts used as prompts unchanged.
        checksums: sha256 of each file, by name.
        excluded: texts left out.
    """

    passages: tuple[Passage, ...]
    prompts: tuple[str, ...]
    checksums: dict[str, str]
    excluded: int


def read_sources(
    data: Sequence[Path], prompts: Sequence[Path], tokenizer_file: Path, exclude: Sequence[Path] = ()
) -> Sources:
    """Read everything that a knowledge base can read (text, JSON lines, Markdown, PDF, ...; also with ``.gz``).

    Args:
        data: files and folders of texts, which are cut into passages.
        prompts: files and folders of prompts; in a file of records, each record is one.
        tokenizer_file: the target's; measures passages.
        exclude: text and JSON lines files whose text must not be trained on, such as the prompts that the head
            is measured on.

    Raises:
        InputError: a path does not exist, or there is no text.
    """
    forbidden = frozenset(run for text in _excluded_texts(exclude) for run in _runs(text))
    chunker = Chunker(tokenizer_file, PASSAGE_TOKENS, overlap=0)
    checksums: dict[str, str] = {}
    passages: list[Passage] = []
    for document in _documents(data, "--data", checksums):
        for chunk in chunker.chunk(document):
            # The file's name often takes the place of a missing title.
            named = chunk.title.lower() in chunk.text.lower()
            passages.append(Passage(chunk.text, chunk.title if named else ""))
    asked = [
        "\n\n".join(part.text for part in document.parts)
        for document in _documents(prompts, "--prompts", checksums)
    ]
    allowed = tuple(each for each in passages if forbidden.isdisjoint(_runs(each.text)))
    allowed_prompts = tuple(text for text in asked if forbidden.isdisjoint(_runs(text)))
    left = len(allowed) + len(allowed_prompts)
    if not left:
        remedy = "all of its text is in the files to exclude; give other texts"
        raise InputError("--data", [str(path) for path in (*data, *prompts)], remedy)
    return Sources(allowed, allowed_prompts, checksums, len(passages) + len(asked) - left)


def _documents(paths: Sequence[Path], option: str, checksums: dict[str, str]) -> list[Document]:
    """All documents in the files; records their checksums."""
    documents: list[Document] = []
    reasons: list[str] = []
    for file in _find(paths, option) if paths else ():
        read = read_file(file)
        checksums[file.source] = read.sha256
        documents += read.documents
        reasons += [f"{skipped.source}: {skipped.reason}" for skipped in read.skipped]
    if paths and not documents:
        shown = str(paths[0]) if len(paths) == 1 else [str(path) for path in paths]
        raise InputError(option, shown, f"there is no text in it; {'; '.join(reasons[:2])}")
    return documents


def _find(paths: Sequence[Path], option: str) -> tuple[SourceFile, ...]:
    try:
        return find_files(paths).files
    except InputError as error:
        raise InputError(option, error.value, error.remedy) from None


def _excluded_texts(paths: Sequence[Path]) -> Iterator[str]:
    """Every string of a JSON lines file, since benchmarks have their own field names; otherwise the whole text."""
    for file in _find(paths, "--exclude") if paths else ():
        text = read_text(file.path)
        try:
            yield from _strings([json.loads(line) for line in text.splitlines() if line.strip()])
        except ValueError:
            yield text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def _runs(text: str) -> Iterator[tuple[str, ...]]:
    """The runs of words that two texts must not share."""
    words = _WORD.findall(text.lower())
    for start in range(len(words) - SHARED_WORDS + 1):
        yield tuple(words[start : start + SHARED_WORDS])


#: Most passages that may accompany a question's own.
_MOST_PASSAGES = 4


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the target is asked.

    Attributes:
        id: unique among the conversations of one data set.
        opening: the first message.
        follow_up: asked after the first answer; empty for none.
        greedy: whether answers are decoded greedily; otherwise they are sampled.
    """

    id: str
    opening: str
    follow_up: str
    greedy: bool


def plan(
    passages: Sequence[Passage],
    ready: Sequence[str] = (),
    *,
    chat: bool,
    sampled: bool,
    seed: int,
) -> list[Conversation]:
    """One conversation for each passage and each ready prompt, in random order.

    Args:
        passages: the texts.
        ready: prompts that are asked unchanged.
        chat: whether the model has a chat template.
        sampled: sample the answers of every second conversation.
        seed: of everything random; the same arguments give the same list.
    """
    draw = random.Random(seed)
    asked: list[tuple[str, str]] = [(prompt, "") for prompt in ready]
    for number, passage in enumerate(passages):
        if not chat:
            asked.append((_beginning(passage.text), ""))
            continue
        others = [passages[draw.randrange(len(passages))] for _ in range(draw.randrange(_MOST_PASSAGES))]
        neighbours = [*passages[max(number - 1, 0) : number], *others][:_MOST_PASSAGES]
        asked.append(_ask(passage, neighbours, draw))
    draw.shuffle(asked)
    return [
        Conversation(str(number), opening, follow_up, greedy=not (sampled and number % 2))
        for number, (opening, follow_up) in enumerate(asked)
    ]


def _beginning(text: str) -> str:
    words = text.split()
    return " ".join(words[: max(len(words) // 2, 1)])


def _ask(passage: Passage, others: Sequence[Passage], draw: random.Random) -> tuple[str, str]:
    kinds = [*_KINDS] if passage.title else [kind for kind in _KINDS if kind.make not in _NEED_TITLE]
    (kind,) = draw.choices(kinds, weights=[kind.share for kind in kinds])
    return kind.make(passage, others, draw)


def _about(passage: Passage, others: Sequence[Passage], draw: random.Random) -> tuple[str, str]:
    del others
    return draw.choice(_ABOUT).format(passage.title), draw.choice(_FOLLOW_UPS)


def _over(passage: Passage, others: Sequence[Passage], draw: random.Random) -> tuple[str, str]:
    del others
    instruction, follow_up = draw.choice(_OVER)
    parts = [instruction, passage.text]
    if draw.random() < 0.3:
        parts.reverse()
    return "\n\n".join(parts), follow_up


def _from_passages(passage: Passage, others: Sequence[Passage], draw: random.Random) -> tuple[str, str]:
    found = [passage, *others]
    draw.shuffle(found)
    texts = "\n\n".join(f"[{number}] {each.title}\n{each.text}" for number, each in enumerate(found, 1))
    question = draw.choice(_QUESTIONS).format(passage.title)
    return draw.choice(_FROM_PASSAGES).format(texts=texts, question=question), ""


def _question(passage: Passage, others: Sequence[Passage], draw: random.Random) -> tuple[str, str]:
    del others
    return draw.choice(_QUESTIONS).format(passage.title), ""


def _calculation(passage: Passage, others: Sequence[Passage], draw: random.Random) -> tuple[str, str]:
    del passage, others
    numbers = {name: draw.randrange(2, most) for name, most in (("a", 60), ("b", 40), ("c", 12), ("d", 9))}
    text = draw.choice(_CALCULATIONS).format(name=draw.choice(_NAMES), thing=draw.choice(_THINGS), **numbers)
    return text, draw.choice(("", "", "Check your answer step by step."))


def _code(passage: Passage, others: Sequence[Passage], draw: random.Random) -> tuple[str, str]:
    del passage, others
    task = f"{draw.choice(_CODE)} {draw.choice(_CODE_TASKS)}."
    return task, draw.choice(("", "Explain how it works.", "Add a test for it."))


@dataclass(frozen=True, slots=True)
class _Kind:
    share: int
    make: Callable[[Passage, Sequence[Passage], random.Random], tuple[str, str]]


_KINDS = (
    _Kind(40, _about),
    _Kind(28, _over),
    _Kind(10, _from_passages),
    _Kind(8, _question),
    _Kind(8, _calculation),
    _Kind(6, _code),
)
_NEED_TITLE = (_about, _from_passages, _question)

_ABOUT = (
    "Tell me about {}.",
    "Explain {} to a ten-year-old.",
    "Write a short blog post about {}.",
    "Write an email in which you recommend a friend to read about {}.",
    "Write a short story in which {} plays a part.",
    "Write a poem about {}.",
    "Give me five interesting facts about {}.",
    "Why is {} worth knowing? Give three reasons.",
    "Plan a one-hour school lesson about {}.",
    "Draft the outline of an essay about {} with headings.",
    "Imagine you are a guide in a museum. Introduce {} to your visitors.",
    "Write a dialogue between a teacher and a student about {}.",
    "Compare {} with something that is often confused with it.",
    "Write three questions for a quiz about {}, with their answers.",
    "What should a newcomer know about {}? Answer in bullet points.",
    "Describe {} in one paragraph, then in one sentence.",
    "Discuss what is good and what is bad about {}.",
    "Write the introduction of a report on {} for a manager who has little time.",
    "What would be different today if there were no {}?",
    "Take the role of an expert on {} who is asked for advice. What do you say first?",
    "Give a step-by-step plan for someone who wants to learn about {}.",
    "Write a speech of one minute about {}.",
    "How does {} work, or how did it come about? Explain step by step.",
    "Write a review of a book about {}.",
    "List the pros and cons of {} in a table.",
    "Write a persuasive letter about {} to a newspaper.",
)
_FOLLOW_UPS = (
    "",
    "",
    "",
    "Now make it shorter.",
    "Rewrite your answer as a numbered list.",
    "Rewrite it for children.",
    "What could be wrong in your answer?",
    "Can you say it more formally?",
    "Give an example.",
    "Translate your answer into German.",
    "Summarise what you said in two sentences.",
)
_OVER = (
    ("Summarise the following text in two sentences.", ""),
    ("Summarize:", "Now in one sentence."),
    ("Give a short summary of this article.", ""),
    ("What are the key points of the text below? Use bullet points.", ""),
    ("Explain the following text in simple words.", ""),
    ("Rewrite this text so that it reads like a newspaper article.", ""),
    ("Write a title for the text below and say why it fits.", ""),
    ("Write three questions that this text answers, each with its answer.", ""),
    ("List all names, places and dates in this text.", "Give the same as JSON."),
    ("Continue this text.", ""),
    ("Extract the most important facts of this text as JSON.", ""),
    ("What does the author of this text want to say? Answer in one paragraph.", "Do you agree? Why?"),
    ("Write a comment on this text for a friend.", ""),
    ("Is this text about a person, a place, a thing or an event? Explain your answer.", ""),
    ("Correct the grammar and spelling of this text.", ""),
    ("Translate into German.", "Now translate your German text into English."),
    ("Translate into French.", "Now translate your French text into English."),
    ("Translate the following text into Spanish.", ""),
)
_QUESTIONS = (
    "What is {}?",
    "Who or what is {}?",
    "What is {} known for?",
    "When and where does {} come from?",
    "Why is {} important?",
    "What can you tell me about {}?",
)
_FROM_PASSAGES = (
    "Answer the question from the passages.\n\n{texts}\n\nQuestion: {question}",
    "{texts}\n\nUse the texts above to answer this question: {question}",
    "Read these search results and answer. Say which of them you used.\n\n{texts}\n\n{question}",
    "Question: {question}\n\nPassages:\n\n{texts}\n\nAnswer in one or two sentences.",
)
_CALCULATIONS = (
    "{name} has {a} {thing} and buys {b} more. Then {name} gives {d} of them to a friend. How many are left?",
    "A box holds {c} {thing}. How many {thing} are in {a} boxes, and how many boxes do {b} {thing} need?",
    "{name} works {c} hours a day for {d} days and earns {b} dollars an hour. How much is that altogether?",
    "A train covers {a} kilometres in {d} hours. How far does it get in {c} hours at the same speed?",
    "{name} reads {c} pages a day. The book has {a} pages and {b} of them are read. How many days remain?",
    "If {d} {thing} cost {a} dollars, what do {c} {thing} cost? Explain each step.",
    "Solve for x: {d}x + {b} = {a}.",
    "What is {a} times {b}, plus {c}? Show your work.",
    "There are {a} {thing} in a basket. A third of them and {d} more are sold. How many stay?",
)
_NAMES = ("Anna", "Ben", "Carla", "David", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kim", "Lena")
_THINGS = (
    "apples",
    "pencils",
    "stamps",
    "eggs",
    "tickets",
    "marbles",
    "books",
    "cookies",
    "flowers",
    "coins",
)
_CODE = (
    "Write a Python function that",
    "Write a short Python program that",
    "Write a JavaScript function that",
    "Write a C function that",
)
_CODE_TASKS = (
    "reverses the words of a sentence",
    "counts how often each letter occurs in a text",
    "tells whether a number is prime",
    "merges two sorted lists",
    "finds the second largest number of a list",
    "removes duplicates from a list and keeps the order",
    "converts a temperature from Fahrenheit to Celsius",
    "checks whether brackets are balanced",
    "computes the n-th Fibonacci number without recursion",
    "reads a CSV file and sums up one column",
    "finds the longest common prefix of some strings",
    "transposes a matrix",
    "validates an email address",
    "implements binary search",
    "implements a stack with push and pop",
    "prints a multiplication table",
)
