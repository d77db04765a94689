"""What a proposal costs: against the length of the context, and against the size of a static corpus."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specrag.bench.data import load_text
from specrag.bench.interleave import Row, Trial
from specrag.bench.measurement import Measurement
from specrag.bench.plots import Axis, Series, line_plot
from specrag.bench.records import Outcome
from specrag.bench.suite import BenchContext

if TYPE_CHECKING:
    from specrag.models.tokenizer import Tokenizer

_CONTEXTS = (1_000, 3_000, 10_000, 30_000, 100_000)
_CORPORA = (1_000_000, 3_000_000, 10_000_000)
_PROPOSALS = 200
_METHOD = "adaptive"
_CONTEXT_TASK, _CORPUS_TASK = "scale/context", "scale/corpus"


def measure(context: BenchContext) -> Iterator[Measurement]:
    """Microseconds of a proposal, building times, and bytes a token."""
    tokens = _Text(context)
    rows = [
        *(_row(_CONTEXT_TASK, length, tokens, _context) for length in _CONTEXTS),
        *(_row(_CORPUS_TASK, length, tokens, _corpus) for length in _CORPORA),
    ]
    records = context.measure("scale", rows, context.plan(3, warmups=1))
    for task in dict.fromkeys(record.key.task for record in records):
        found = [
            record.outcome for record in records if record.key.task == task and record.outcome is not None
        ]
        names = found[0].figures if found else {}
        middle = {name: float(np.median([outcome.figures[name] for outcome in found])) for name in names}
        yield context.measurement(task=task, method=_METHOD, n=len(found), extra=middle)


def pictures(measurements: Sequence[Measurement], folder: Path) -> Iterator[Path]:
    """Microseconds over tokens."""
    series = []
    for task, figure, label in (
        (_CONTEXT_TASK, "proposal_us", "ReSpec's tree from the request's own text"),
        (_CONTEXT_TASK, "lookup_us", "of that the suffix automaton: a token more, three copies"),
        (_CORPUS_TASK, "proposal_us", "static corpus (suffix array on disk): three copies"),
    ):
        points = [
            (int(entry.task.split("=")[1]), float(str(entry.extra[figure])))
            for entry in measurements
            if entry.task.startswith(task + "=")
        ]
        if points:
            series.append(Series(label=label, x=[x for x, _ in points], y=[y for _, y in points]))
    if series:
        yield line_plot(
            folder / "tokens-scale.png",
            series,
            title="Cost of a proposal",
            x=Axis(label="tokens", log=True),
            y=Axis(label="microseconds (median of 200)"),
        )


class _Text:
    """Tokens of real text; the rest of the largest corpus is the same text with its sentences in another order."""

    def __init__(self, context: BenchContext) -> None:
        self._context = context
        self._tokens: NDArray[np.int32] | None = None

    def first(self, count: int) -> NDArray[np.int32]:
        if self._tokens is None:
            self._tokens = self._read(max(_CORPORA))
        return self._tokens[:count]

    def _read(self, count: int) -> NDArray[np.int32]:
        from specrag.models.catalog import resolve
        from specrag.models.tokenizer import Tokenizer

        tokenizer = Tokenizer(resolve(self._context.model))
        known = np.concatenate(
            [np.array(ids, dtype=np.int32) for ids in _pieces(self._context, tokenizer, count)]
        )
        rng = np.random.default_rng(0)
        parts = [known]
        while sum(map(len, parts)) < count:
            cuts = np.array_split(known, max(len(known) // 20, 1))
            parts.append(np.concatenate([cuts[place] for place in rng.permutation(len(cuts))]))
        return np.concatenate(parts)[:count]


def _pieces(context: BenchContext, tokenizer: Tokenizer, count: int) -> Iterator[list[int]]:
    if context.data is None:
        yield tokenizer.encode(load_text(None).content, special=False)
        return
    from benchmarks.retrieval.data import CORPUS
    from specrag.bench.data import find_file, load_passages

    total = 0
    for passage in load_passages(find_file(context.data, CORPUS)):
        ids = tokenizer.encode(passage.text, special=False)
        total += len(ids)
        yield ids
        if total >= count:
            return


def _row(task: str, length: int, text: _Text, trial: Callable[[NDArray[np.int32]], Outcome]) -> Row:
    def prepare() -> Mapping[str, Trial]:
        tokens = text.first(length)
        return {_METHOD: lambda: trial(tokens)}

    return Row(name="proposals", task=f"{task}={length}", methods=(_METHOD,), prepare=prepare)


def _context(tokens: NDArray[np.int32]) -> Outcome:
    """Index a context, then propose behind each of the last tokens, as decoding does."""
    from specrag.engine.executor import run
    from specrag.engine.session import Session
    from specrag.models.toy import ToyModel
    from specrag.speculation.drafters.base import NoDrafter
    from specrag.speculation.drafters.retrieval import RetrievalDrafter, RetrievalSettings

    session = Session(
        ToyModel(vocab_size=2, order=1, scale=1.0, seed=0), tokens=tokens[:-_PROPOSALS].tolist()
    )
    drafter = RetrievalDrafter(RetrievalSettings(), NoDrafter(), lambda: 0)
    started = time.perf_counter()
    run(drafter.start(session, ()))
    inserted = time.perf_counter() - started
    seconds = []
    for token in tokens[-_PROPOSALS:].tolist():
        session.tokens.append(token)
        began = time.perf_counter()
        _exhaust(drafter.propose(session, 60))
        seconds.append(time.perf_counter() - began)
    bytes_a_token = drafter.nbytes / len(tokens)
    drafter.close()
    lookups = _lookups(tokens)
    return Outcome(
        seconds=sum(seconds),
        figures={
            "proposal_us": 1e6 * float(np.median(seconds)),
            "lookup_us": 1e6 * float(np.median(lookups)),
            "inserting_ms": 1e3 * inserted,
            "bytes_a_token": bytes_a_token,
        },
    )


def _lookups(tokens: NDArray[np.int32]) -> list[float]:
    """Seconds that the automaton itself takes of it: adding the newest token, three copies behind the longest match."""
    from specrag.speculation.suffix.automaton import SuffixAutomaton

    automaton = SuffixAutomaton()
    automaton.extend(tokens[:-_PROPOSALS])
    seconds = []
    for place in range(len(tokens) - _PROPOSALS, len(tokens)):
        began = time.perf_counter()
        automaton.extend(tokens[place : place + 1])
        for end in automaton.occurrences(automaton.longest_match(), 3):
            automaton.continuation(int(end), 20)
        seconds.append(time.perf_counter() - began)
    return seconds


def _exhaust(coroutine: object) -> None:
    """Run a coroutine that asks for nothing, without an executor's own cost."""
    for request in coroutine:  # type: ignore[attr-defined]
        raise AssertionError(request)


def _corpus(tokens: NDArray[np.int32]) -> Outcome:
    """Build a corpus in one text, then look the last tokens up as decoding does."""
    from specrag.speculation.suffix.corpus import SuffixCorpus, build_corpus

    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        build_corpus([tokens], Path(folder) / "corpus", tokenizer="bench")
        built = time.perf_counter() - started
        with SuffixCorpus.open(Path(folder) / "corpus", tokenizer="bench") as corpus:
            places = np.random.default_rng(1).integers(100, len(tokens) - 100, _PROPOSALS)
            seconds = []
            for place in places.tolist():
                tail = tokens[place - 8 : place]
                began = time.perf_counter()
                match = corpus.match(tail, 32)
                for end in corpus.occurrences(match, 3):
                    corpus.continuation(int(end), 20)
                seconds.append(time.perf_counter() - began)
            size = corpus.nbytes
    return Outcome(
        seconds=sum(seconds),
        figures={
            "proposal_us": 1e6 * float(np.median(seconds)),
            "building_s": built,
            "bytes_a_token": size / len(tokens),
        },
    )
