"""What ``specrag bench longcontext`` times: RAPID and its rivals behind one prompt that is read once a row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from benchmarks.longcontext.data import LongRow
from benchmarks.longcontext.judge import Judge
from benchmarks.longcontext.labels import (
    ADAPTIVE,
    ETAS,
    LC,
    METHODS,
    NAIVE,
    RAG,
    STREAMING,
    with_eta,
)
from specrag.bench.interleave import Trial
from specrag.bench.machine import half_precision
from specrag.bench.records import Outcome
from specrag.engine.outputs import LOGITS
from specrag.engine.passes import Coroutine, SessionModel
from specrag.engine.sampling import log_softmax, warp
from specrag.engine.sampling_params import SamplingParams
from specrag.engine.session import Session
from specrag.methods.rapid.baselines import StreamingDecoder
from specrag.methods.rapid.context.retriever import ContextRetriever, ContextSettings
from specrag.methods.rapid.decoder import RapidDecoder, Reading
from specrag.methods.rapid.prompt import ContextQuestion, encode, text_of
from specrag.retrieval.documents.contexts import ContextChunk, documents_of
from specrag.retrieval.encoder.encoder import DEFAULT_ENCODER, Encoder, load_encoder
from specrag.speculation.augmented_target import augmented_probs, guarded
from specrag.speculation.decode import Step
from specrag.speculation.tree import DraftTree

if TYPE_CHECKING:
    from specrag.language_model import LanguageModel
    from specrag.methods.base import Decoder
    from specrag.methods.rapid.context.scores import Scoring
    from specrag.models.tokenizer import Tokenizer
    from specrag.request import Options, Result

T = TypeVar("T")

#: Tokens of a chunk; the paper's 512 would be a whole part here.
CHUNK_TOKENS = 128
_MOST_GOLD = 32
#: Of the paper's two temperatures the lower one, where a method needs one.
LEAST_TEMPERATURE = 0.1


@dataclass
class Prepared:
    """A row, read by the target.

    Attributes:
        tokens: the target's prompt.
        part: the chunks that the drafter reads.
        prefill: seconds that reading the prompt took.
        retrieval: seconds of cutting, encoding and ranking.
    """

    row: LongRow
    tokens: tuple[int, ...]
    part: Sequence[ContextChunk]
    prefill: float
    retrieval: float
    gold: dict[str, float] = field(default_factory=dict)

    def reading(self, tokenizer: Tokenizer) -> list[int]:
        """The drafter's prompt, in its own tokens."""
        asked = ContextQuestion(self.row.question, instruction="")
        if self.row.messages:
            return encode(tokenizer, asked.after_part(self.part))
        return encode(tokenizer, asked.about_text(text_of(self.part, several=False)))


class Subjects:
    """One target and its methods, which learn from row to row as in use; loaded when first needed.

    Args:
        name, device, dtype: of the target.
        scoring: how chunks are ranked.
        window: entries of the streaming drafter's cache.
        judge: rates replies in conversations; ``None`` where nobody does.
    """

    def __init__(
        self,
        name: str,
        device: str,
        dtype: str | None = None,
        scoring: Scoring = "dense",
        window: int = 4096,
        judge: Judge | None = None,
    ) -> None:
        self.name = name
        self.judge = judge
        self.warm = False  # what compiles at its first call has done so
        self._device = device
        self._dtype = dtype or half_precision(device)
        self.scoring: Scoring = scoring
        self._window = window
        self._loaded: LanguageModel | None = None
        self._held: Session | None = None
        self._methods: dict[str, Decoder | RapidDecoder] = {}
        self._retrievers: dict[int, ContextRetriever] = {}
        self._encoder: Encoder | None = None

    @property
    def settings(self) -> dict[str, str | int]:
        """What it was made with, for another process; its judge apart."""
        given = {"name": self.name, "device": self._device, "dtype": self._dtype}
        return {**given, "scoring": self.scoring, "window": self._window}

    @property
    def llm(self) -> LanguageModel:
        """The target."""
        if self._loaded is None:
            from specrag.language_model import load

            self._loaded = load(self.name, dtype=self._dtype, device=self._device)
        return self._loaded

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The target's, without its weights: a run that only resumes loads none."""
        from specrag.models.catalog import resolve
        from specrag.models.tokenizer import Tokenizer

        return Tokenizer(resolve(self.name))

    def encode(self, text: str) -> list[int]:
        """The target's tokens of a text."""
        return self.tokenizer.encode(text, special=False)

    def close(self) -> None:
        """Make room for the next model."""
        self._methods.clear()
        if self._loaded is not None:
            self._forget()
            self._loaded.close()
            self._loaded = None

    def prepare(self, row: LongRow, part_tokens: int, part: Sequence[ContextChunk] | None = None) -> Prepared:
        """Read a row's prompt, which all its methods then share, and find the part for the drafter.

        Args:
            row: what is asked.
            part_tokens: tokens that the drafter reads at most.
            part: read this in place of what is found.
        """
        prepared = self.unread(row, part_tokens, part)
        self._forget()
        session = Session(self.llm.model)
        started = time.perf_counter()
        self._run(session.extend(prepared.tokens))
        self._held = session
        self.llm.prefixes.hold(session)
        return replace(prepared, prefill=time.perf_counter() - started)

    def unread(self, row: LongRow, part_tokens: int, part: Sequence[ContextChunk] | None = None) -> Prepared:
        """As :meth:`prepare`, but every method reads the prompt itself."""
        retrieval = 0.0
        if part is None:
            self._retriever(part_tokens)
            started = time.perf_counter()
            part = self.part(row, part_tokens)
            retrieval = time.perf_counter() - started
        asked = ContextQuestion(row.question, instruction="")
        messages = asked.after(row.messages) if row.messages else asked.about_text(row.document)
        return Prepared(row, tuple(encode(self.llm.tokenizer, messages)), part, 0.0, retrieval)

    def part(self, row: LongRow, part_tokens: int) -> Sequence[ContextChunk]:
        """The chunks that matter, at most so many tokens."""
        retriever = self._retriever(part_tokens)
        context = (
            retriever.messages(row.messages, self._tokenizer_file)
            if row.messages
            else retriever.documents(documents_of(row.document), self._tokenizer_file)
        )
        return [scored.chunk for scored in retriever.select(row.question, context).chunks]

    def trial(
        self, label: str, prepared: Prepared, new: int, *, ends: bool = False, temperature: float = 0.0
    ) -> Trial:
        """Decode behind the row's prompt; the outcome's time is that of decoding alone.

        Args:
            new: tokens to write.
            ends: stop where the model ends its text, and say whether it is right.
            temperature: 0 is greedy, but where the drafter's opinion has a share, which it has in drawn texts only.
        """

        def run() -> Outcome:
            method, tokens = self._method(label, prepared)
            transfers = isinstance(method, Reading) and method.method.eta > 0
            heat = temperature or (LEAST_TEMPERATURE if transfers else 0.0)
            options: Options = {"max_tokens": new, "ignore_eos": not ends, "temperature": heat}
            started = time.perf_counter()
            made, reading = _drained(self.llm, tokens, {**options, "method": method})
            total = time.perf_counter() - started
            usage, timing = made.usage, made.timing
            decode = timing.decode - reading
            shared = 0.0 if label == RAG else prepared.prefill
            retrieval = 0.0 if label in (LC, STREAMING, ADAPTIVE) else prepared.retrieval
            rounds = max(usage.passes, 1)
            figures = {
                "end_to_end_ms": 1e3 * (total + shared + retrieval),
                "prefill_ms": 1e3 * (shared + timing.prefill),
                "drafter_prefill_ms": 1e3 * reading,
                "retrieval_ms": 1e3 * retrieval,
                "draft_ms": 1e3 * timing.drafting / rounds,
                "verify_ms": 1e3 * timing.verifying / rounds,
                "drafting_share": timing.drafting / decode,
                "verifying_share": timing.verifying / decode,
            }
            row = prepared.row
            if label in prepared.gold:
                figures["gold_nats"] = prepared.gold[label]
            if row.messages and self.judge is not None:
                asked = {"role": "user", "content": row.question}
                figures["rating"] = self.judge.rating([*row.own_messages, asked], made.text)
            return Outcome(
                tokens=usage.completion_tokens,
                seconds=decode,
                output=str([token.token for token in made.tokens]),
                passes=usage.passes,
                drafted=usage.drafted,
                accepted=usage.accepted,
                correct=float(row.right(made.text)) if ends and row.can_be_right else None,
                figures=figures,
            )

        return run

    def score_gold(self, prepared: Prepared, drafter: str = "") -> None:
        """Fill in the log-probability, a token, of the first right answer under every law; temperature 1.

        Args:
            drafter: another model of the same vocabulary that reads the part too; empty for the target alone.
        """
        unit = SamplingParams(temperature=1.0)
        gold = self.encode(prepared.row.answers[0])[:_MOST_GOLD]
        assert self._held is not None
        target = self._run(_behind(self._held.fork(), gold))
        part = prepared.reading(self.llm.tokenizer)
        readers = {"": self._reads(self.llm.model, part, gold)}
        if drafter:
            method = self._known(with_eta(0, drafter))
            assert isinstance(method, RapidDecoder)
            readers[drafter] = self._reads(method.drafter_model(self.llm.loaded).model, part, gold)
        prepared.gold[LC] = prepared.gold[NAIVE] = _mean_nats([log_softmax(row) for row in target], gold)
        prepared.gold[RAG] = _mean_nats([log_softmax(row) for row in readers[""]], gold)
        for reader, opinions in readers.items():
            for eta in (0, *ETAS):
                laws = []
                for mine, theirs in zip(target, opinions, strict=True):
                    own, opinion = warp(mine, unit), warp(theirs, unit).dense(len(mine))
                    moved = guarded(augmented_probs(own, opinion, eta), own, "renormalised")
                    laws.append(np.log(np.maximum(moved, 1e-300)))
                prepared.gold[with_eta(eta, reader)] = _mean_nats(laws, gold)

    # -- parts ----------------------------------------------------------------------------------------------

    @property
    def _tokenizer_file(self) -> Path:
        return self.llm.loaded.files.folder / "tokenizer.json"

    def _retriever(self, part_tokens: int) -> ContextRetriever:
        """Ready to work: what is loaded and compiled at its first question is nobody's time."""
        if part_tokens not in self._retrievers:
            settings = ContextSettings(
                CHUNK_TOKENS, min_tokens=part_tokens, max_tokens=part_tokens, scoring=self.scoring
            )
            if self._encoder is None and self.scoring != "bm25":
                self._encoder = load_encoder(DEFAULT_ENCODER)
            made = ContextRetriever(settings, encoder=self._encoder)
            made.retrieve("What is it?", documents_of("A text to begin with."), self._tokenizer_file)
            self._retrievers[part_tokens] = made
        return self._retrievers[part_tokens]

    def _method(self, label: str, prepared: Prepared) -> tuple[Decoder, Sequence[int]]:
        """The method for a row, and the prompt that the target reads."""
        method = self._known(label)
        if isinstance(method, RapidDecoder):
            reader = method.drafter_model(self.llm.loaded)
            return method.reading(prepared.reading(reader.tokenizer)), prepared.tokens
        if label == RAG:
            return method, prepared.reading(self.llm.tokenizer)
        return method, prepared.tokens

    def _known(self, label: str) -> Decoder | RapidDecoder:
        if label not in self._methods:
            made = StreamingDecoder(self._window) if label == STREAMING else METHODS[label]()
            self._methods[label] = made
        return self._methods[label]

    def _reads(self, model: SessionModel, part: Sequence[int], gold: Sequence[int]) -> list[np.ndarray]:
        """The logits in front of each of some tokens that follow the part."""
        session = Session(model)
        try:
            self._run(session.extend(part))
            return self._run(_behind(session, gold))
        finally:
            session.close()

    def _forget(self) -> None:
        if self._held is not None:
            self.llm.prefixes.release(self._held)
            self._held.close()
            self._held = None

    def _run(self, coroutine: Coroutine[T]) -> T:
        return self.llm.executor.run(self.llm.executor.submit(coroutine))


def _behind(session: Session, tokens: Sequence[int]) -> Coroutine[list[np.ndarray]]:
    """The logits in front of each of some tokens that follow a session."""
    rows = yield from session.score(DraftTree.chain(tokens[:-1], "gold"), LOGITS)
    session.commit(())
    return [row.logits for row in rows if row.logits is not None]


def _mean_nats(laws: Sequence[np.ndarray], gold: Sequence[int]) -> float:
    return float(np.mean([law[token] for law, token in zip(laws, gold, strict=True)]))


def _drained(llm: LanguageModel, tokens: Sequence[int], options: Options) -> tuple[Result, float]:
    """The whole generation, and the seconds in which the drafter read its prompt."""
    steps = llm.stream(tokens, **options)
    reading = 0.0
    while True:
        try:
            event = next(steps)
            reading += event.reading if isinstance(event, Step) else 0.0
        except StopIteration as stop:
            made: Result = stop.value
            return made, reading
