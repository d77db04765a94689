"""Readers for the data that suites measure on, prompts of a given length, and a sample text for runs without data.

The user names the folder with ``--data DIR`` or ``$SPECRAG_DATA``. Files are JSON lines or plain text, gzipped if the
name ends in ``.gz``. Each reader takes the public format of its data set, so a full copy works as well.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from specrag.errors import InputError

DATA_VARIABLE = "SPECRAG_DATA"
"""Environment variable that names the data folder unless the caller does."""

SPEC_BENCH_TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")
WIKITEXT_TEST, WIKITEXT_VALID = "wikitext_test.txt", "wikitext_valid.txt"
_PASSAGE_FILE = "corpus_wiki_passages.jsonl"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A Spec-Bench or MT-Bench question; ``turns`` are the user's messages in order."""

    identifier: str
    category: str
    turns: tuple[str, ...]

    @property
    def task(self) -> str:
        """One of Spec-Bench's six tasks; the eight MT-Bench categories make up ``multi-turn``."""
        return self.category if self.category in SPEC_BENCH_TASKS else "multi-turn"


@dataclass(frozen=True, kw_only=True)
class LongPrompt:
    """A LongBench prompt with the answers that count as right, and, for a classification task, all classes."""

    identifier: str
    task: str
    prompt: str
    answers: tuple[str, ...]
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A passage of a corpus."""

    identifier: str
    title: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Text:
    """Running text to cut prompts from; ``source`` names its origin for the report."""

    source: str
    content: str


def data_folder(given: Path | None) -> Path | None:
    """The data folder: ``given``, else ``$SPECRAG_DATA``, else None.

    Raises:
        InputError: the folder does not exist.
    """
    folder = given
    field = "--data"
    if folder is None and os.environ.get(DATA_VARIABLE):
        folder, field = Path(os.environ[DATA_VARIABLE]), DATA_VARIABLE
    if folder is not None and not folder.is_dir():
        raise InputError(field, str(folder), "give a folder that exists")
    return folder


def find_file(folder: Path, name: str) -> Path:
    """``folder/name`` or ``folder/name.gz``, whichever exists.

    Raises:
        InputError: neither exists.
    """
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise InputError("--data", str(folder), f"give a folder that holds {name} or {name}.gz")


def read_text(path: Path) -> str:
    """A text file, gzipped or not.

    Raises:
        InputError: the file is not UTF-8 text, or its gzip form is damaged.
    """
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError("data file", str(path), f"give a readable UTF-8 text file ({error})") from error


def read_wikitext(folder: Path, name: str) -> str:
    """A WikiText file as ordinary text (:func:`detokenize`).

    Raises:
        InputError: it is missing or cannot be read.
    """
    return detokenize(read_text(find_file(folder, name)))


def read_json_lines(path: Path) -> Iterator[dict[str, object]]:
    """The objects of a JSON lines file, gzipped or not; empty lines are skipped.

    Raises:
        InputError: a line is not a JSON object; the message names the file and the line.
    """
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise InputError("data file", f"{path.name}:{number}", "write one JSON object a line")
        yield value


def load_spec_bench(path: Path) -> list[Question]:
    """Questions in the format of Spec-Bench and MT-Bench (``question_id, category, turns``)."""
    return [
        Question(
            identifier=str(_value(path, row, "question_id")),
            category=str(_value(path, row, "category")),
            turns=_texts(path, row, "turns"),
        )
        for row in read_json_lines(path)
    ]


def load_long_bench(path: Path) -> list[LongPrompt]:
    """Prompts in the format of LongBench with the context filled in (``id, task, prompt, answers``).

    A classification task's ``answers`` may be an object that holds ``answers`` and ``all_classes``.
    """
    prompts = []
    for row in read_json_lines(path):
        given = row.get("answers")
        answers = given if isinstance(given, dict) else row
        prompts.append(
            LongPrompt(
                identifier=str(_value(path, row, "id")),
                task=str(_value(path, row, "task")),
                prompt=str(_value(path, row, "prompt")),
                answers=_texts(path, answers, "answers"),
                classes=_texts(path, answers, "all_classes") if answers.get("all_classes") else (),
            )
        )
    return prompts


def load_passages(path: Path) -> Iterator[Passage]:
    """Passages of a corpus (``id, title, text``), in order."""
    for row in read_json_lines(path):
        yield Passage(
            identifier=str(_value(path, row, "id")),
            title=str(row.get("title", "")),
            text=str(_value(path, row, "text")),
        )


def load_text(folder: Path | None) -> Text:
    """Running text: WikiText or the passages in ``folder``, or the small built-in sample if there is no folder.

    Raises:
        InputError: the folder holds none of these files.
    """
    if folder is None:
        return Text(source="built-in sample", content=SAMPLE)
    for name in (WIKITEXT_TEST, WIKITEXT_VALID):
        if (folder / name).is_file() or (folder / f"{name}.gz").is_file():
            return Text(source=name, content=read_wikitext(folder, name))
    content = "\n\n".join(passage.text for passage in load_passages(find_file(folder, _PASSAGE_FILE)))
    return Text(source=_PASSAGE_FILE, content=content)


def token_prompts(
    text: Text, encode: Callable[[str], Sequence[int]], *, length: int, count: int
) -> list[list[int]]:
    """``count`` prompts of exactly ``length`` tokens, cut from evenly spaced places of the text.

    If the text is too short, it is read again from its start. That is fine for timing a pass but wrong for a method
    that looks for repetitions: give such a method real data.

    Args:
        encode: text to token ids, without special tokens.

    Raises:
        InputError: ``length`` or ``count`` is below 1, or the text has no tokens.
    """
    for name, value in (("length", length), ("count", count)):
        if value < 1:
            raise InputError(name, value, "give 1 or more")
    content = text.content[: 8 * length * count + 1000]  # encoding a whole corpus takes minutes
    tokens = list(encode(content))
    if len(tokens) < length * count:
        tokens = list(encode(text.content))
    if not tokens:
        raise InputError("text", text.source, "give a text that is not empty")
    step = max(len(tokens) // count, 1)
    starts = [index * step for index in range(count)]
    return [[tokens[(start + offset) % len(tokens)] for offset in range(length)] for start in starts]


def _value(path: Path, row: Mapping[str, object], name: str) -> object:
    if name not in row:
        raise InputError("data file", path.name, f"give every line a field {name!r}")
    return row[name]


def _texts(path: Path, row: Mapping[str, object], name: str) -> tuple[str, ...]:
    value = _value(path, row, name)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise InputError("data file", path.name, f"make {name!r} a list of texts")
    return tuple(value)


#: Patterns and their replacements, applied in order; the start and the end of a line count as a blank.
_STEPS: Final = tuple(
    (re.compile(pattern, re.MULTILINE), replacement)
    for pattern, replacement in (
        (r"[^\S\n]+", " "),
        (r"(?:\d+ @[,.]@ |@-@ )*<unk>(?: @[-,.]@(?= |$)| 's(?= |$)| '(?= [a-z]))*", ""),
        (r" +", " "),
        (r'" "|\( [,;:\u2013\u2014 ]*\)|\[ \]', ""),
        (r" @([-,.])@ ", r"\1"),
        (r"^ ?((?:= )*=) (.*?)((?: =)+) ?$", lambda line: _heading(line[1], line[2], line[3])),
        (r'"([^"\n]*)"', lambda part: f'"{part[1].strip(" ")}"'),
        (r"([(\[]) ", r"\1"),
        (r" ([)\]])", r"\1"),
        (r" '(s|t|m|d|re|ve|ll)\b", r"'\1"),
        (r"s ' (?=[a-z])", "s' "),
        (r"([$£€¥#]) (?=\d)", r"\1"),
        (r"(?<=\d) (?=%)", ""),
        (r"(?<=\d) ([\u2013/]) (?=\d)", r"\1"),
        (r" +(?=(?:[,.;:!?]|\.\.\.)(?:[ \"')\]]|$))", ""),
        (r"([,;:])(?: ?[,;])+", r"\1"),
        (r" +", " "),
        (r"^ | $", ""),
    )
)


def _heading(before: str, title: str, after: str) -> str:
    return f"{before.replace(' ', '')} {title} {after.replace(' ', '')}"


def detokenize(text: str) -> str:
    """The text as it was before it was split into words, as far as it can be reconstructed."""
    for pattern, replacement in _STEPS:
        text = pattern.sub(replacement, text)
    return text


SAMPLE = """\
The harbour wakes before the town does. At four in the morning the first lamps move along the quay, and the
men who carry them speak low, as if the water could hear. Ice is shovelled into wooden boxes. Somebody tests
an engine, lets it cough, and stops it again. By five the boats are gone, one behind the other, past the
breakwater and the green light at its end, and the gulls that followed them come back one by one.

Maren kept the books of the fish market for thirty-one years. Each crate had a number, each number a line,
and each line a boat, a weight and a price. She wrote with a pencil, because ink runs when it gets wet, and
everything in the market gets wet. When the office bought its first computer, she asked what it would do on
the day the power failed. Nobody knew. On that day, the third of November, the auction was held by the light
of two car headlamps, and the only list of what had been sold to whom was hers.

A tide table looks like arithmetic, and for the most part it is. The moon pulls, the sun pulls a little less,
and the shape of the coast decides what becomes of it. Twice a day the water rises by about three metres at
the pier and by almost five at the head of the bay, where the shore narrows and the flood has nowhere else to
go. But wind is not in the table. A storm from the west can hold the water in the bay for half a day, and a
week of high pressure can press it down by the width of a hand. So the pilots read the table first, then the
barometer, and then they look out of the window.

How do you measure the length of a coast? With a long ruler you cut across every cove, with a short one you
follow it in and out again, and the shorter the ruler, the longer the coast. The surveyors of the old map
walked with a chain of twenty metres and found 212 kilometres. The new map, made from the air, says 340. Both
are right, and neither is of use to somebody who wants to know how long the walk takes: two days and a half
in dry weather, three in wet, with a night at the lighthouse and another at the farm above the white cliffs.

The lighthouse itself is younger than it looks. The tower that stands today was finished in 1887, on the
foundation of an older one that burned coal in an iron basket. Its lens floated in a bath of mercury and could
be turned with one finger. A clockwork driven by a falling weight did the turning, and the keeper wound it up
every four hours, so that he never slept longer than that in all his years. Now a motor of the size of a
coffee cup turns the light, and a small panel on the gallery makes its electricity from the sun.

Recipe for the soup that the canteen serves on Fridays, for forty people. Peel six kilograms of potatoes and
cut them small. Wash ten leeks, slice them, and let them go soft in half a kilogram of butter. Add the
potatoes, eight litres of fish stock, twelve bay leaves and two spoons of salt, and cook for twenty minutes.
Cut four kilograms of smoked haddock into pieces, take out the bones, and put it in with three litres of milk.
Heat it until it steams, but never let it boil. Parsley on top, bread beside it.

Questions that visitors ask most often, with the answers of the harbour office. When does the ferry leave?
At seven, at eleven, at three and at six; on Sundays not at seven. May I take a dog? Yes, on a lead. Can I see
seals? Often, on the sandbank, two hours before and after low water. Where can I buy fish? In the hall behind
the crane, from six to ten, and after that from the shop in Rope Street, which buys it in the same hall. Is
the water cold? It is never warmer than seventeen degrees, and nobody who grew up here calls that cold.
"""
