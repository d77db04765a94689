"""What pasted passages cost in accuracy and save before the first token, by which of their tokens are read again.

``python -m benchmarks.rag.blocks OUT --data FOLDER [--model NAME] [--rows N] [--sets S ...] [--ways W ...]``

Every way answers the same questions from the same five passages (``longbench``: twelve of a long text), whose keys
and values are known: ``exact`` reads the prompt; ``none``, ``first 16`` (what ``reuse=blocks`` does) and ``first 32``
read so many tokens of each passage again; ``deviation 15 %`` and ``30 %`` those whose keys and values differ most
from exact ones, an upper bound of what CacheBlend (Yao et al. 2025) chooses, since the exact ones are known here;
``disk`` is ``first 16`` from 8 bits, as ``specrag index --read`` keeps them. Records go to ``OUT/blocks.jsonl`` as
they come; a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import specrag
from benchmarks.answers.data import Question
from benchmarks.rag import longbench
from benchmarks.records import read_records
from specrag.bench.statistics import paired_bootstrap
from specrag.engine.kv import dequantize, quantize
from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.language_model import LanguageModel
from specrag.methods.blocks import WORTH_PASTING, alone, find_blocks, template_head
from specrag.methods.prompts import build_prompt, encode_prompt, is_small
from specrag.methods.wording import wording
from specrag.models.catalog import default_model
from specrag.retrieval.passage import Passage

SETS = ("popqa", "hotpotqa", "musique", "nq-corpus", "triviaqa-corpus")
WAYS = ("exact", "none", "first 16", "first 32", "disk", "deviation 15 %", "deviation 30 %")
_PASSAGES, _NEW = 5, 40
#: Tokens that are chosen together by their deviation.
_WINDOW = 16

#: Tokens ``start`` to ``end`` of a prompt.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Placed:
    """A passage in a prompt: where it stands, and the session that has read it alone."""

    span: Span
    source: Session
    head: int


def main() -> None:
    """Write what has no record yet, then the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--rows", type=int, default=50, help="of each set")
    parser.add_argument("--sets", nargs="+", default=SETS, choices=(*SETS, longbench.NAME), metavar="S")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, metavar="W")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "blocks.jsonl"
    known = read_records(path)
    done = {(one["model"], one["set"], one["id"]) for one in known}
    sets = longbench.load_among(given.data, given.sets, given.rows)
    asked = [row[place] for place in range(given.rows) for row in sets.values() if place < len(row)]
    left = [one for one in asked if (given.model, one.set, one.identifier) not in done]
    if left:
        with (
            closing(specrag.load(given.model)) as llm,
            path.open("a", encoding="utf-8") as file,
        ):
            trial = Trial(llm, given.ways)
            trial.answers(left[0])  # compiles
            for question in left:
                record = {"model": given.model, "set": question.set, "id": question.identifier}
                file.write(json.dumps({**record, **trial.answers(question)}, ensure_ascii=False) + "\n")
                file.flush()
    sys.stdout.write(table(read_records(path)))


class Trial:
    """Answers questions every way."""

    def __init__(self, llm: LanguageModel, ways: Sequence[str] = WAYS) -> None:
        self._llm = llm
        self._ways = ways
        self._small = is_small(llm)
        self._head = template_head(llm)

    def answers(self, question: Question) -> dict[str, Any]:
        """A question's record: tokens, and of each way its text, whether it is right and seconds to the first token."""
        passages = question.passages[: longbench.PASSAGES if question.set == longbench.NAME else _PASSAGES]
        words = wording(question.task.text)
        messages = build_prompt(
            question.task.text, passages, instruction=words.instruction, label=words.question
        )
        lead = words.lead if self._small else ""
        prompt: list[int] = list(encode_prompt(self._llm, messages, {}, lead).prompt)  # type: ignore[arg-type]
        placed = self._place(prompt, passages)
        told: dict[str, Any] = {
            "tokens": len(prompt),
            "pasted": sum(one.span[1] - one.span[0] for one in placed),
        }
        deviation: list[float] = []
        if any(way.startswith("deviation") for way in self._ways):
            exact = self._run(self._read(prompt))
            deviation = self._deviations(exact, prompt, placed)
            exact.close()
        ways: dict[str, Callable[[], Coroutine[Session]]] = {
            "exact": lambda: self._read(prompt[:-1]),
            "none": lambda: self._paste(prompt, placed, _first(placed, 0)),
            "first 16": lambda: self._paste(prompt, placed, _first(placed, 16)),
            "first 32": lambda: self._paste(prompt, placed, _first(placed, 32)),
            "disk": lambda: self._paste(prompt, coarse, _first(placed, 16)),
            "deviation 15 %": lambda: self._paste(prompt, placed, _chosen(placed, deviation, 0.15)),
            "deviation 30 %": lambda: self._paste(prompt, placed, _chosen(placed, deviation, 0.3)),
        }
        coarse = [Placed(one.span, _in_eight_bits(one.source), one.head) for one in placed]
        for way in self._ways:
            told[way] = self._answer(question, prompt, ways[way])
        for one in (*placed, *coarse):
            one.source.close()
        return told

    def _place(self, prompt: Sequence[int], passages: Sequence[Passage]) -> list[Placed]:
        """The passages as they stand in the prompt, each read alone."""
        found = []
        for block in find_blocks(self._llm, prompt, passages):
            if block.end - block.start >= WORTH_PASTING:
                tokens = alone(self._head, prompt[block.start : block.end])
                source = self._run(self._read(tokens))
                found.append(Placed((block.start, block.end), source, len(self._head)))
        return found

    def _answer(
        self, question: Question, prompt: list[int], begin: Callable[[], Coroutine[Session]]
    ) -> dict[str, Any]:
        started = time.perf_counter()
        session = self._run(begin())
        seconds = time.perf_counter() - started
        result = self._run(self._llm.generating(prompt, {"max_tokens": _NEW, "stop": "\n"}, session))
        text = result.text.split("]", 1)[-1] if self._small else result.text
        first = seconds + result.timing.prefill
        return {"text": result.text, "right": question.is_right(text), "first": round(first, 4)}

    def _run(self, coroutine: Coroutine[Any]) -> Any:
        return self._llm.executor.run(self._llm.executor.submit(coroutine))

    def _read(self, tokens: Sequence[int]) -> Coroutine[Session]:
        session = Session(self._llm.loaded.model)
        yield from session.extend(tokens)
        return session

    def _paste(
        self, prompt: Sequence[int], placed: Sequence[Placed], anew: Sequence[Sequence[Span]]
    ) -> Coroutine[Session]:
        """The prompt up to the end of the last passage, these tokens of each passage read in their place."""
        session = Session(self._llm.loaded.model)
        for one, spans in zip(placed, anew, strict=True):
            start, end = one.span
            at, shift = start, one.head - start
            for first, last in (*spans, (end, end)):
                if at < first:
                    before = prompt[len(session) : at]
                    yield from session.paste(one.source, at + shift, first + shift, before)
                at = last
        if placed:
            yield from session.extend(prompt[len(session) : placed[-1].span[1]])
        return session

    def _deviations(self, exact: Session, prompt: Sequence[int], placed: Sequence[Placed]) -> list[float]:
        """Of each token, how far the second layer's keys and values are from exact ones if nothing is read again."""
        pasted = self._run(self._paste(prompt, placed, _first(placed, 0)))
        # The cache never holds a session's newest token.
        self._run(pasted.extend(prompt[len(pasted) : len(pasted) + 1]))
        length = pasted.cache.length
        mine, own = (each.cache.rows(1, 0, length).float() for each in (pasted, exact))
        pasted.close()
        found: list[float] = (mine - own).pow(2).sum(dim=(0, 1, 3)).tolist()
        return found


def _first(placed: Sequence[Placed], count: int) -> list[list[Span]]:
    return [
        [(start, min(start + count, end))] if count else [] for start, end in (one.span for one in placed)
    ]


def _chosen(placed: Sequence[Placed], deviation: Sequence[float], share: float) -> list[list[Span]]:
    """The windows that deviate most, until they are this share of all pasted tokens."""
    windows: list[tuple[float, int, Span]] = []
    for number, (start, end) in enumerate(one.span for one in placed):
        for first in range(start, end, _WINDOW):
            last = min(first + _WINDOW, end)
            windows.append((fmean(deviation[first:last]), number, (first, last)))
    left = share * sum(end - start for start, end in (one.span for one in placed))
    chosen: list[list[Span]] = [[] for _ in placed]
    for _, number, span in sorted(windows, reverse=True):
        if left <= 0:
            break
        chosen[number].append(span)
        left -= span[1] - span[0]
    return [sorted(spans) for spans in chosen]


def _in_eight_bits(session: Session) -> Session:
    """A copy whose keys and values have been written to 8 bits and read again."""
    cache = session.model.new_cache()
    rows = session.cache.length
    extent = cache.prepare(rows)
    for layer in range(cache.shape.layers):
        numbers = session.cache.rows(layer, 0, rows)
        extent.write(layer, 0, dequantize(quantize(numbers), cache.shape.dtype))
    cache.accept(range(rows))
    return Session(session.model, cache, session.tokens)


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """By model and way: right answers, the paired difference from exact in points, and the first token's time."""
    lines = [
        "| model | way | n | right | against exact, points | first token, s | of exact's |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for model in dict.fromkeys(one["model"] for one in records):
        lines += _rows(model, [one for one in records if one["model"] == model])
    return "\n".join(lines) + "\n"


def _rows(model: str, records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for way in WAYS:
        asked = [one for one in records if way in one]
        if not asked:
            continue
        own, exact = [one[way] for one in asked], [one["exact"] for one in asked]
        found = paired_bootstrap([one["right"] for one in own], [one["right"] for one in exact])
        against = f"{100 * found.difference:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
        first = median(one["first"] for one in own)
        share = median(one["first"] / other["first"] for one, other in zip(own, exact, strict=True))
        cells = (
            model,
            way,
            f"{len(own)}",
            f"{100 * fmean(one['right'] for one in own):.1f} %",
            "" if way == "exact" else against,
            f"{first:.2f}",
            f"{share:.2f}",
        )
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
