"""The class to name in vLLM's ``--speculative-config``."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specrag.errors import SpecragError
from specrag.integrations.vllm.copying import NO_CHAIN, Acceptance, Chain, Found
from specrag.integrations.vllm.memory import AnswerFile, AnswerMemory
from specrag.integrations.vllm.pace import Pace
from specrag.integrations.vllm.requests import (
    Request,
    asked,
    extra_of,
    open_tokenizer,
    watch_requests,
)
from specrag.integrations.vllm.rows import Batch, Row, Rows
from specrag.integrations.vllm.settings import Settings
from specrag.integrations.vllm.stats import Stats
from specrag.speculation.suffix import SuffixCorpus

# vLLM shows what is logged under its own name.
_log = logging.getLogger("vllm.specrag")

#: From this match length in a row's own text on, no other text is searched.
_LONG_ENOUGH = 16
#: Most tokens of a row that are looked up in other texts.
_TAIL = 64
_LOG_SECONDS = 10.0


class Drafter:
    """Proposes what followed earlier occurrences of the newest tokens; guesses no more than pays off.

    It copies from each request's prompt and output, from passages that the request gives (``specrag_passages`` in its
    ``vllm_xargs``), and, as :class:`Settings` say, from a corpus on disk and from earlier answers of the same tenant.
    vLLM verifies the guesses, so they change no output.

    Args:
        config: vLLM's ``VllmConfig``.
        clock: seconds, for tests.

    Raises:
        InputError: a setting cannot be used, or another tokenizer made the corpus.
    """

    def __init__(self, config: Any, *, clock: Callable[[], float] = time.perf_counter) -> None:
        settings = Settings.read(config)
        self._most = int(config.speculative_config.num_speculative_tokens)
        self._max_length = int(config.model_config.max_model_len)
        self._vocabulary = int(config.model_config.get_vocab_size())
        self._config = config
        self._clock = clock
        self._settings = settings
        self._encode: Callable[[str], Sequence[int]] | None = None
        self._corpus = self._open_corpus(settings.corpus) if settings.corpus else None
        self._memory = AnswerMemory(settings.answer_memory)
        self._file = self._answer_file(settings.answer_folder) if settings.answer_folder else None
        if self._file is not None:
            self._file.read(self._memory)
        self._failed = False
        self._begin()

    def _begin(self) -> None:
        """Start without any row."""
        self._acceptance = Acceptance.of_all()
        self._rows = Rows()
        self._pace = Pace(self._clock)
        self._stats = Stats()
        self._seen: dict[str, Request] = {}  # requests that have not ended, by name
        self._names: Sequence[str] = ()
        self._logged = self._clock()

    @property
    def stats(self) -> Stats:
        """Counts so far; also logged every ten seconds while there is work."""
        return self._stats

    def load_model(self, *args: object, **kwargs: object) -> None:
        """Start watching requests, and compile the loops so that no request waits for that; no model is loaded."""
        del args, kwargs
        reason = watch_requests()
        if reason:
            _log.warning("specrag: passages and tenants of requests cannot be seen: %s", reason)
        self._rehearse()

    def _rehearse(self) -> None:
        """Propose for a made-up row, which compiles what is not compiled yet, and forget the row."""
        memory, self._memory = self._memory, AnswerMemory(1000)
        self._logged = math.inf
        tokens = np.tile(np.arange(8, dtype=np.int32), 8)[None]
        self._memory.add("rehearsal", tokens[0])
        self._memory.find("rehearsal", tokens[0])
        if self._corpus is not None:
            tail = self._corpus.tokens[1:3]
            Found(self._corpus, self._corpus.tokens, self._corpus.match(tail), "corpus", tail).chain(
                2, Acceptance.of_one(), self._acceptance
            )
        for length in range(24, 32):
            self.propose([[int(tokens[0, length - 1])]], np.array([length]), tokens)
        self._memory = memory
        self._begin()

    def see_requests(self, names: Sequence[str], known: Mapping[str, Any]) -> None:
        """Receive the requests of the batch for the next proposal (:func:`watch_requests`).

        Args:
            names: by row.
            known: vLLM's state of every request that has not ended, by name.
        """
        self._names = names
        for name in names:
            if name not in self._seen:
                extra = extra_of(known.get(name))
                self._seen[name] = Request(name, extra, self._encoder() if asked(extra) else None)
        if len(self._seen) > len(names):
            self._seen = {name: request for name, request in self._seen.items() if name in known}

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Guess what follows in each row.

        Args:
            sampled_token_ids: by row, the tokens of the last step; none while a prompt is being read.
            num_tokens_no_spec: int ``[rows or more]``, tokens of each row, including those.
            token_ids_cpu: int32 ``[rows or more, most tokens]``.
            slot_mappings: not used.

        Returns:
            By row, the guesses, at most ``num_speculative_tokens``; none if none pays off.
        """
        del slot_mappings
        count = len(sampled_token_ids)
        lengths = np.asarray(num_tokens_no_spec[:count]).tolist()
        names, self._names = self._names, ()
        requests = [self._seen[name] for name in names[:count]] if len(names) >= count else []
        batch = Batch(sampled_token_ids, lengths, token_ids_cpu, requests)
        began = self._clock()
        self._pace.arrive(sampled_token_ids, lengths)
        guesses: list[list[int]] = [[] for _ in range(count)]
        if count and not self._pace.pauses(count):
            try:
                guesses = self._guess(batch)
            except Exception as error:  # nothing else catches it, and the server would end
                self._forget(error)
        guessed = sum(map(len, guesses))
        self._note(count, guessed, self._clock() - began)
        self._pace.leave(lengths, guessed)
        return guesses

    def _guess(self, batch: Batch) -> list[list[int]]:
        rows, gone = self._rows.follow(batch)
        self._end(gone)
        for place, row in enumerate(rows):
            self._learn(row, batch, place)
        for place, row in enumerate(rows):
            row.chain = self._chain(row, batch, place)
        counts = self._pace.choose([row.chain.chances for row in rows], batch.lengths)
        for row, sent in zip(rows, counts, strict=True):
            row.sent = sent
            if sent:
                self._stats.sources[row.chain.source] += sent
        return [row.chain.tokens[: row.sent].tolist() for row in rows]

    def _learn(self, row: Row, batch: Batch, place: int) -> None:
        """Compare the last guesses with the tokens that came."""
        sent, row.sent = row.sent, 0
        chain, row.chain = row.chain, NO_CHAIN
        if not len(chain.tokens):
            return
        length = batch.lengths[place]
        came = batch.tokens[place, length - row.fresh : length]
        self._stats.accepted += min(chain.came(came, row.acceptance, self._acceptance), sent)

    def _chain(self, row: Row, batch: Batch, place: int) -> Chain:
        most = min(self._most, self._max_length - batch.lengths[place] - 1)
        if most < 1 or not batch.sampled[place] or not row.is_whole:
            return NO_CHAIN
        found = self._longest(row)
        if not found.match.length:
            return NO_CHAIN
        chain = found.chain(most, row.acceptance, self._acceptance)
        # vLLM crashes on a token that the model does not have, which a corpus of another model's tokens may hold.
        return chain if max(chain.tokens.tolist(), default=0) < self._vocabulary else NO_CHAIN

    def _longest(self, row: Row) -> Found:
        """Where the longest suffix of a row's text occurs; on a tie, the row's own text goes before other texts."""
        automaton = row.text.automaton
        best = Found(automaton, row.tokens, automaton.longest_match(), "request", row.tokens)
        others = self._corpus is not None or self._settings.answer_memory > 0
        if best.match.length >= _LONG_ENOUGH or not others:
            return best
        tail = row.tokens[max(row.text.offset, len(row.tokens) - _TAIL) :]
        remembered = self._memory.find(self._tenant_of(row), tail)
        if remembered is not None and remembered.match.length > best.match.length:
            best = remembered
        if self._corpus is not None:
            match = self._corpus.match(tail)
            if match.length > best.match.length:
                best = Found(self._corpus, self._corpus.tokens, match, "corpus", tail)
        return best

    def _tenant_of(self, row: Row) -> str:
        return row.request.tenant or self._settings.tenant

    def _end(self, gone: Sequence[Row]) -> None:
        """Remember the answers of rows that left, and drop rows that will not return."""
        for row in gone:
            added = self._memory.add(self._tenant_of(row), row.answer())
            if added and self._file is not None:
                self._file.keep(self._memory)
            row.remembered = row.indexed
        self._rows.drop(lambda row: bool(row.request.name) and row.request.name not in self._seen)

    def _encoder(self) -> Callable[[str], Sequence[int]] | None:
        """The encoder of passages; opened when the first request gives some."""
        if self._encode is None:
            tokenizer = open_tokenizer(self._config)
            if tokenizer is None:
                _log.warning(
                    "specrag: the model has no tokenizer.json on this machine: passages are left out"
                )
                return None
            self._encode = lambda text: tokenizer.encode(text, special=False)
        return self._encode

    def _open_corpus(self, folder: str) -> SuffixCorpus:
        tokenizer = open_tokenizer(self._config)
        if tokenizer is None:
            _log.warning(
                "specrag: no tokenizer.json on this machine: that the corpus fits the model is not checked"
            )
        corpus = SuffixCorpus.open(folder, tokenizer=None if tokenizer is None else tokenizer.fingerprint)
        _log.info("specrag: corpus of %d tokens in %d texts", corpus.manifest.tokens, corpus.manifest.texts)
        return corpus

    def _answer_file(self, folder: str) -> AnswerFile:
        tokenizer = open_tokenizer(self._config)
        model = {
            "name": str(self._config.model_config.model),
            "tokenizer": "" if tokenizer is None else tokenizer.fingerprint,
        }
        return AnswerFile(Path(folder), model, self._vocabulary)

    def _forget(self, error: Exception) -> None:
        """Start over rather than stop the server, which never needs a guess."""
        self._rows = Rows()
        if not self._failed:
            unexpected = not isinstance(error, SpecragError)
            _log.warning("specrag: rows are begun anew: %s", error, exc_info=unexpected)
        self._failed = True

    def _note(self, rows: int, guesses: int, seconds: float) -> None:
        stats = self._stats
        stats.calls += 1
        stats.rows += rows
        stats.drafted += guesses
        stats.seconds += seconds
        stats.reasons[self._pace.reason] += 1
        if self._clock() - self._logged >= _LOG_SECONDS:
            self._logged = self._clock()
            _log.info("specrag: %s", stats.line())
