"""The metrics that Prometheus reads at ``/metrics``: latency, guesses by source, load.

There are few labels, and their values are ours, so that no request can create new series: routes, methods, sources of
tokens; never users, or knowledge bases and models that a request names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from specrag.methods import method_names

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 600)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.3, 2.6)
_MAT = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8, 12, 16)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TENTHS = (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)


@dataclass(frozen=True, slots=True)
class FinishedGeneration:
    """The figures of one finished answer.

    Args:
        method: how it was decoded.
        reason: ``stop``, ``length``, ``tool_calls``, ``cancelled``, ``deadline`` or ``error``.
        prompt_tokens, cached_tokens, completion_tokens: counts.
        passes: the target's passes after prefill.
        drafted_by, accepted_by: tokens by source.
        queued, first_token, total: seconds from arrival to the start, to the first token and to the last token;
            None if it did not get that far.
        prompt, answer: what was sent and written, if the log may hold it; else None.
    """

    method: str
    reason: str
    prompt_tokens: int
    completion_tokens: int
    passes: int
    drafted_by: Mapping[str, int]
    accepted_by: Mapping[str, int]
    total: float
    cached_tokens: int = 0
    queued: float | None = None
    first_token: float | None = None
    prompt: str | None = None
    answer: str | None = None


class Metrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        self._methods = frozenset(method_names())
        registry = self.registry = CollectorRegistry()
        self._requests = Counter(
            "specrag_requests", "Answered requests.", ["route", "method", "status"], registry=registry
        )
        self._latency = Histogram(
            "specrag_request_seconds", "From a request's head to the end of its answer.", ["route"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._generations = Counter(
            "specrag_generations", "Answers generated.", ["method", "reason"], registry=registry
        )
        self._first = Histogram(
            "specrag_time_to_first_token_seconds", "From arrival to the first token.", ["method"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._total = Histogram(
            "specrag_generation_seconds", "From arrival to the last token.", ["method"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._per_token = Histogram(
            "specrag_time_per_output_token_seconds", "Between the first and the last token, by token.", ["method"],
            buckets=_STEP_SECONDS, registry=registry,
        )  # fmt: skip
        self._queued = Histogram(
            "specrag_queue_seconds", "From arrival to the start.", buckets=_SECONDS, registry=registry
        )
        self._batch = Histogram(
            "specrag_batch_size", "Texts of one packed pass.", buckets=_BATCH, registry=registry
        )
        self._rows = Histogram(
            "specrag_pass_rows", "Its tokens, guesses included.", buckets=_ROWS, registry=registry
        )
        self._prompt = Counter("specrag_prompt_tokens", "Tokens of prompts.", registry=registry)
        self._cached = Counter("specrag_cached_prompt_tokens", "Of these, not read anew.", registry=registry)
        self._tokens = Counter(
            "specrag_tokens", "Generated tokens by who proposed them.", ["source"], registry=registry
        )
        self._drafted = Counter("specrag_drafted_tokens", "Guessed tokens.", ["source"], registry=registry)
        self._accepted = Counter(
            "specrag_accepted_tokens", "Guesses that were right.", ["source"], registry=registry
        )
        self._mat = Histogram(
            "specrag_mean_accepted_tokens", "Tokens by pass of one answer (MAT).", ["method"],
            buckets=_MAT, registry=registry,
        )  # fmt: skip
        self._acceptance = Histogram(
            "specrag_acceptance", "Share of one answer's guesses that were right.", ["method"],
            buckets=_TENTHS, registry=registry,
        )  # fmt: skip
        self._passages = Counter(
            "specrag_retrieved_passages", "Passages retrieved for answers.", registry=registry
        )
        self._search = Histogram(
            "specrag_search_seconds", "Of a search of a knowledge base.", buckets=_SECONDS, registry=registry
        )
        self._rejected = Counter(
            "specrag_rejected_requests", "Refused before any work.", ["reason"], registry=registry
        )
        self._jobs = Counter("specrag_index_jobs", "Uploads indexed.", ["result"], registry=registry)

    # -- figures that are read when Prometheus asks -----------------------------------------------------------

    def watch(self, name: str, description: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read on demand, such as ``queue_length`` or ``running_texts``.

        Args:
            name: without the prefix ``specrag_``.
            description: one line.
            read: returns the value; called from any thread.
        """
        Gauge(f"specrag_{name}", description, registry=self.registry).set_function(read)

    # -- events -----------------------------------------------------------------------------------------------

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Record an answered request; ``route`` is the template, not the path."""
        self._requests.labels(route, method, str(status)).inc()
        self._latency.labels(route).observe(seconds)

    def generation(self, done: FinishedGeneration) -> None:
        """Record an answer that has ended, successfully or not."""
        method = done.method if done.method in self._methods else "other"
        self._generations.labels(method, done.reason).inc()
        self._prompt.inc(done.prompt_tokens)
        self._cached.inc(done.cached_tokens)
        self._total.labels(method).observe(done.total)
        if done.queued is not None:
            self._queued.observe(done.queued)
        if done.first_token is not None:
            self._first.labels(method).observe(done.first_token)
            if done.completion_tokens > 1:
                step = (done.total - done.first_token) / (done.completion_tokens - 1)
                self._per_token.labels(method).observe(max(step, 0.0))
        for source, count in done.drafted_by.items():
            self._drafted.labels(source).inc(count)
        for source, count in done.accepted_by.items():
            self._accepted.labels(source).inc(count)
            self._tokens.labels(source).inc(count)
        accepted = sum(done.accepted_by.values())
        self._tokens.labels("target").inc(max(done.completion_tokens - accepted, 0))
        if done.passes:
            self._mat.labels(method).observe(done.completion_tokens / done.passes)
        drafted = sum(done.drafted_by.values())
        if drafted:
            self._acceptance.labels(method).observe(accepted / drafted)

    def packed_pass(self, texts: int, rows: int) -> None:
        """Record one pass of a model over the rows of several texts."""
        self._batch.observe(texts)
        self._rows.observe(rows)

    def search(self, seconds: float, passages: int = 0) -> None:
        """Record a search of a knowledge base."""
        self._search.observe(seconds)
        self._passages.inc(passages)

    def rejected(self, reason: str) -> None:
        """Record a refused request; there are only a few reasons."""
        self._rejected.labels(reason).inc()

    def job(self, result: str) -> None:
        """Record how a job ended: ``done``, ``failed`` or ``cancelled``."""
        self._jobs.labels(result).inc()

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)
