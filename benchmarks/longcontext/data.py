"""Long contexts with questions: LongBench's, and needles and key-value pairs of any length, made from a seed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specrag.bench.data import find_file, load_long_bench, load_text, read_json_lines
from specrag.bench.metrics import contains_answer
from specrag.errors import InputError
from specrag.methods.prompts import Message

_V1, _V2 = "longbench_v1_mini.jsonl", "longbench_v2_dev.jsonl"
#: Tasks of LongBench v1 whose answers are short and stand in the text.
ANSWERED = ("qasper", "multifieldqa_en", "2wikimqa", "hotpotqa", "musique", "triviaqa")
#: Tasks with long answers, for speed.
WRITTEN = ("gov_report", "multi_news", "qmsum")
#: Where a prompt of LongBench goes over from the text to the question, and the most characters behind that.
_PARAGRAPH = re.compile(r"\n\n")
_LONGEST_QUESTION = 900
_PLACES = (
    "harbour",
    "observatory",
    "library",
    "greenhouse",
    "archive",
    "foundry",
    "chapel",
    "station",
    "vault",
)
_KINDS = ("northern", "old", "small", "hidden", "stone", "western", "ruined", "royal", "quiet", "upper")

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class LongRow:
    """A question about a long text.

    Attributes:
        name: unique within its set.
        kind: the set: ``needle``, ``key-value``, a task of LongBench v1, ``longbench-v2``, or ``conversation``.
        document: the long text; empty where a conversation is the long context.
        question: what is asked, its instruction included.
        answers: those that count as right; empty where only speed is measured. Of a conversation the reference reply.
        messages: the conversation, oldest first.
        own_messages: those of them that the question goes on from.
    """

    name: str
    kind: str
    document: str
    question: str
    answers: tuple[str, ...] = ()
    messages: tuple[Message, ...] = ()
    own_messages: tuple[Message, ...] = ()

    @property
    def can_be_right(self) -> bool:
        """Whether an answer is right or wrong; replies in conversations are rated."""
        return bool(self.answers) and not self.messages

    def right(self, text: str) -> bool:
        """Whether a text holds a right answer; for a letter, whether it begins with it."""
        if self.kind == "longbench-v2":
            return text.strip().lstrip("(*").startswith(self.answers[0])
        return contains_answer(text, self.answers)


def needles(data: Path | None, encode: Encode, length: int, count: int) -> Iterator[LongRow]:
    """One sentence in ``length`` tokens of running text, with ten like it about other things."""
    sentences = [
        part.strip() for part in re.split(r"(?<=[.!?])\s+|\n+", load_text(data).content) if len(part) > 40
    ]
    for number in range(count):
        rng = random.Random(f"needle/{length}/{number}")
        places = [f"{kind} {place}" for kind in _KINDS for place in _PLACES]
        rng.shuffle(places)
        facts = [(place, str(rng.randrange(10_000, 99_999))) for place in places[:10]]
        lines = [f"The access code of the {place} is {code}." for place, code in facts]
        start = rng.randrange(len(sentences))
        body: list[str] = []
        used = sum(len(encode(line)) for line in lines)
        while used < length:
            body.append(sentences[(start + len(body)) % len(sentences)])
            used += len(encode(body[-1])) + 1
        for line in lines:
            body.insert(rng.randrange(len(body) + 1), line)
        place, code = facts[0]
        question = f"What is the access code of the {place}? Answer in one sentence."
        yield LongRow(
            name=f"needle {length} {number}",
            kind="needle",
            document=" ".join(body),
            question=question,
            answers=(code,),
        )


def key_values(encode: Encode, length: int, count: int) -> Iterator[LongRow]:
    """One key among as many as ``length`` tokens hold."""
    for number in range(count):
        rng = random.Random(f"key-value/{length}/{number}")
        pairs: list[tuple[str, str]] = []
        used = 0
        while used < length:
            key, value = (f"{rng.randrange(16**8):08x}" for _ in range(2))
            pairs.append((key, value))
            used += len(encode(f'"{key}": "{value}",\n'))
        key, value = rng.choice(pairs)
        text = "{\n" + ",\n".join(f'"{one}": "{other}"' for one, other in pairs) + "\n}"
        question = f'What is the value of the key "{key}" in the JSON object? Give the value alone.'
        yield LongRow(
            name=f"key-value {length} {number}",
            kind="key-value",
            document=text,
            question=question,
            answers=(value,),
        )


def mixed(
    data: Path | None, encode: Encode, decode: Callable[[Sequence[int]], str], length: int, count: int
) -> list[LongRow]:
    """A fixed mix of tasks: needles, key-value pairs, and LongBench's texts cut to the length."""
    room = length - 200  # for the question and the chat template
    found = long_bench(data, (*ANSWERED, *WRITTEN), encode, length, 4 * length)
    texts = found[:: max(len(found) // count, 1)][:count]
    cut = [replace(row, document=without_middle(row.document, encode, decode, room)) for row in texts]
    own: list[LongRow] = []
    for needle, pair in zip(needles(data, encode, room, count), key_values(encode, room, count), strict=True):
        own += [needle, pair]
    # A third of made-up questions, whose answers are short copies; all of them where there are no texts.
    made = max(count - len(cut), (count + 2) // 3)
    return [*own[:made], *cut][:count]


def long_bench(
    data: Path | None, tasks: Sequence[str], encode: Encode, least: int, most: int
) -> list[LongRow]:
    """LongBench v1's prompts of these tasks that have so many tokens, whole; without data none."""
    if data is None:
        return []
    found = []
    for row in load_long_bench(find_file(data, _V1)):
        # A token has three to six characters in these texts: most rows need not be encoded to be left out.
        if (
            row.task in tasks
            and 2 * least < len(row.prompt) < 7 * most
            and least <= len(encode(row.prompt)) <= most
        ):
            document, question = split_question(row.prompt)
            found.append(
                LongRow(
                    name=row.identifier,
                    kind=row.task,
                    document=document,
                    question=question,
                    answers=row.answers,
                )
            )
    return found


def long_bench_v2(data: Path | None, encode: Encode, most: int) -> list[LongRow]:
    """LongBench v2's questions whose context has at most so many tokens."""
    if data is None:
        return []
    found = []
    for row in read_json_lines(find_file(data, _V2)):
        document, choices = str(row["context"]), row["choices"]
        if len(document) > 7 * most or len(encode(document)) > most or not isinstance(choices, dict):
            continue
        listed = "\n".join(f"({letter}) {text}" for letter, text in choices.items())
        question = f"{row['question']}\n{listed}\nAnswer with the letter of the right choice alone."
        answer = str(row["answer"])
        found.append(
            LongRow(
                name=str(row["id"]),
                kind="longbench-v2",
                document=document,
                question=question,
                answers=(answer,),
            )
        )
    return found


def split_question(prompt: str) -> tuple[str, str]:
    """A prompt's long text and what is asked behind it: the last paragraphs, as far as they are short."""
    borders = [found.start() for found in _PARAGRAPH.finditer(prompt.rstrip())]
    near = [place for place in borders if place >= len(prompt) - _LONGEST_QUESTION]
    cut = near[0] if near else max(len(prompt) - _LONGEST_QUESTION, 0)
    return prompt[:cut].strip(), prompt[cut:].strip()


def without_middle(text: str, encode: Encode, decode: Callable[[Sequence[int]], str], length: int) -> str:
    """The beginning and the end of a text, ``length`` tokens together; the text itself if it has no more."""
    tokens = list(encode(text))
    if len(tokens) <= length:
        return text
    return (
        decode(tokens[: length // 2]) + "\n[...]\n" + decode(tokens[len(tokens) - (length - length // 2) :])
    )


_FILE = "mtbench101.jsonl"
KIND = "conversation"

#: A user's message and the reply.
Exchange = tuple[Message, Message]


def conversations(data: Path | None, encode: Encode, length: int, count: int) -> list[LongRow]:
    """Histories of about ``length`` tokens; without data none.

    The last question of a dialogue is asked; its earlier exchanges stand, in their order, at places drawn from a seed
    among the exchanges of other dialogues. The dialogues asked about are evenly spread over the file.
    """
    if data is None:
        return []
    dialogues = [_exchanges(row) for row in read_json_lines(find_file(data, _FILE))]
    asked = [number for number, dialogue in enumerate(dialogues) if len(dialogue) > 1]
    chosen = asked[:: max(len(asked) // count, 1)][:count]
    return [_row(dialogues, number, encode, length) for number in chosen]


def _row(dialogues: Sequence[Sequence[Exchange]], number: int, encode: Encode, length: int) -> LongRow:
    rng = random.Random(f"conversation/{length}/{number}")
    *own, last = dialogues[number]
    others = [place for place in range(len(dialogues)) if place != number]
    rng.shuffle(others)
    history: list[Exchange] = []
    used = sum(_size(exchange, encode) for exchange in (*own, last))
    for exchange in (exchange for place in others for exchange in dialogues[place]):
        used += _size(exchange, encode)
        if used > length:
            break
        history.append(exchange)
    # From the last place to the first, so that an insertion moves none of those that are still to come.
    places = sorted(rng.randrange(len(history) + 1) for _ in own)
    for place, exchange in reversed(list(zip(places, own, strict=True))):
        history.insert(place, exchange)
    return LongRow(
        name=f"conversation {length} {number}",
        kind=KIND,
        document="",
        question=last[0]["content"],
        answers=(last[1]["content"],),
        messages=tuple(message for exchange in history for message in exchange),
        own_messages=tuple(message for exchange in own for message in exchange),
    )


def _exchanges(row: Mapping[str, Any]) -> list[Exchange]:
    try:
        return [
            ({"role": "user", "content": turn["user"]}, {"role": "assistant", "content": turn["bot"]})
            for turn in row["history"]
        ]
    except (KeyError, TypeError):
        remedy = "every turn of its history needs user and bot"
        raise InputError(_FILE, f"row {row.get('id')}", remedy) from None


def _size(exchange: Exchange, encode: Encode) -> int:
    """Tokens, with those of the chat template, which are about four a message."""
    return sum(len(encode(message["content"])) + 4 for message in exchange)
