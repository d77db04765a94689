"""Long chat histories: a dialogue of MT-Bench-101 whose turns are spread among those of many others (RAPID, 4.4)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specrag.bench.data import find_file, read_json_lines
from specrag.bench.suites.longcontext_data import Encode, LongRow
from specrag.errors import InputError
from specrag.methods.rag_prompt import Message

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
