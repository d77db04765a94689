"""A model whose every token depends on its whole context, a knowledge base full of ties, and a plain oracle."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np

from specrag import LanguageModel
from specrag.engine.executor import Executor, SearchThreads
from specrag.engine.outputs import Row
from specrag.engine.passes import Search, Segment
from specrag.engine.processors import build_processors
from specrag.engine.sampling import choose
from specrag.engine.sampling_params import SamplingParams
from specrag.errors import SpecragError
from specrag.methods.decoding import make_decoder
from specrag.methods.ralmspec import Iterative, RaLMSpec, Sequential
from specrag.methods.ralmspec.result import IterativeAnswer
from specrag.methods.ralmspec.search import Searched
from specrag.methods.ralmspec.sequential import SequentialPipeline
from specrag.methods.ralmspec.speculative import RaLMSpecPipeline
from specrag.methods.ralmspec.text import chunk_seed
from specrag.methods.resources import Resources
from specrag.models.catalog import ModelFiles
from specrag.models.loading import LoadedModel
from specrag.models.tokenizer import Tokenizer
from specrag.models.toy import ToyCache, ToyModel
from specrag.request import Options
from specrag.retrieval.index.base import Query, Ranking
from specrag.retrieval.index.bm25 import BM25Index, BM25Settings
from specrag.retrieval.index.flat import FlatIndex
from specrag.retrieval.index.scoring import Bools, Floats, Longs
from specrag.retrieval.passage import Passage

USER, ASSISTANT, END = 0, 1, 2
#: The bytes of the alphabet as byte-level BPE writes them; the last two are one character together.
PIECES = ("<u>", "<a>", "<e>", "a", "b", "c", "d", "Ġ", "Ċ", "Ã", "©")
LETTERS = "abcd \né"
WORDS = ["aa", "bb", "cc", "dd", "aé", "ab"]

Chosen = TypeVar("Chosen", bound=Iterative.Options)


class WholeContextModel(ToyModel):
    """Its logits depend on every token before: a passage, a position or a row that is wrong changes the text."""

    def __init__(self, seed: int, end_logit: float = 0.0, context_length: int = 400) -> None:
        super().__init__(len(PIECES), order=1, seed=seed, context_length=context_length)
        self.rows_of = np.random.default_rng(seed).normal(0.0, 2.0, (509, len(PIECES))).astype(np.float32)
        self.rows_of[:, END] += end_logit
        self.caches: list[ToyCache] = []
        self.on_pass: Callable[[], None] = lambda: None

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        row: np.ndarray = self.rows_of[hash(tuple(tokens)) % len(self.rows_of)]
        return row

    def new_cache(self) -> ToyCache:
        self.caches.append(ToyCache())
        return self.caches[-1]

    def forward(self, segments: Sequence[Segment]) -> list[list[Row]]:
        answers = super().forward(segments)
        self.on_pass()
        return answers


@cache
def toy_tokenizer(chat: bool) -> Tokenizer:
    """A real byte-level tokenizer of eleven tokens, with a chat template or without."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE(vocab={piece: i for i, piece in enumerate(PIECES)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in PIECES[:3]])
    config: dict[str, Any] = {"eos_token": "<e>"}
    if chat:
        config["chat_template"] = "{% for m in messages %}<u>{{ m['content'] }}{% endfor %}<a>"
    with TemporaryDirectory() as name:
        folder = Path(name)
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = Tokenizer(ModelFiles("toy", folder, "none", "none"))
        assert tokenizer.eos_tokens == {END}  # read while the files are there
    return tokenizer


def toy_llm(model: ToyModel, *, chat: bool = True, kept_bytes: int = 0) -> LanguageModel:
    files = ModelFiles("toy", Path(), "none", "none")
    return LanguageModel(
        LoadedModel("toy", files, model, toy_tokenizer(chat), "fp32", "cpu"), prefix_cache_bytes=kept_bytes
    )


def options_of(kind: type[Chosen], values: dict[str, Any]) -> Chosen:
    """Options of a method; the toy's passages are so short that they are cut to fewer tokens than a caller may ask."""
    rest = {name: value for name, value in values.items() if name != "passage_tokens"}
    cut = {"passage_tokens": values["passage_tokens"]} if "passage_tokens" in values else {}
    return kind(**rest).model_copy(update=cut)


def sequential(llm: Any, retriever: Any, *, system: str | None = None, **values: Any) -> SequentialPipeline:
    """Sequential retrieval with these options."""
    options = options_of(Sequential.Options, values)
    return SequentialPipeline(
        llm, retriever, options, make_decoder(options.decoder, Resources(llm)), system=system
    )


def ralmspec(
    llm: Any,
    retriever: Any,
    *,
    reuse: bool = True,
    make: type[RaLMSpecPipeline] = RaLMSpecPipeline,
    **values: Any,
) -> RaLMSpecPipeline:
    """RaLMSpec with these options; unless they say otherwise it weighs every guess, and waits for searches."""
    chosen: dict[str, Any] = {"stride": "cost-aware", "asynchronous": False, **values}
    options = options_of(RaLMSpec.Options, chosen)
    return make(llm, retriever, options, make_decoder(options.decoder, Resources(llm)), reuse=reuse)


class StoreError(SpecragError):
    """What a remote store says when it is gone."""


@dataclass
class ToyRetriever:
    """A few passages behind a real index; small whole numbers as vectors, and few words, tie all the time.

    Attributes:
        kind: ``flat``, ``bm25``, or ``approximate``, which misses passages that the cache may hold.
        window: last letters of a query that count.
        fail_from: searches from this number on fail.
        remote: as of a store on another machine.
        during_search: called in the search's thread.
    """

    seed: int
    size: int = 12
    kind: str = "flat"
    window: int = 3
    fail_from: int = 10**9
    remote: bool = True
    during_search: Callable[[], None] = lambda: None
    searches: list[int] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.texts = [" ".join(rng.choice(WORDS, size=rng.integers(1, 14))) for _ in range(self.size)]
        self.index: FlatIndex | BM25Index
        if self.kind == "bm25":
            self.index = BM25Index.build(self.texts, BM25Settings(languages=()))
        else:
            vectors = rng.integers(-1, 2, (self.size, 4)).astype(np.float32)
            self.index = FlatIndex.build(vectors[rng.integers(0, self.size, self.size)])

    def __len__(self) -> int:
        return self.size

    def encode(self, texts: Sequence[str]) -> list[Query]:
        self.asked += texts
        return [self._query(text) for text in texts]

    def _query(self, text: str) -> Query:
        end = text[-self.window :]
        if isinstance(self.index, BM25Index):
            return Query(text, terms=self.index.terms(" ".join(2 * letter for letter in end)))
        counts = [end.count(letter) for letter in "abcd"]
        return Query(text, vector=np.array(counts, dtype=np.float32))

    def search(self, queries: Sequence[Query], k: int, allowed: Bools | None = None) -> list[Ranking]:
        self.searches.append(len(queries))
        self.during_search()
        if len(self.searches) > self.fail_from:
            raise StoreError("store: it does not answer; start it again")
        return [self.index.search([query], k, self._seen(query.text))[0] for query in queries]

    def _seen(self, text: str) -> Bools:
        """An approximate search overlooks a third of the passages, other ones for each query."""
        if self.kind != "approximate" or self.size < 3:
            return np.ones(self.size, dtype=np.bool_)
        seen: Bools = (np.arange(self.size) + sum(text.encode())) % 3 != 0
        return seen

    def score(self, queries: Sequence[Query], passage_ids: Longs) -> Floats:
        return self.index.score(queries, passage_ids)

    def passages(self, ids: Sequence[int]) -> list[Passage]:
        return [Passage(id, f"{id}.txt", "", "", self.texts[id], {}) for id in ids]

    def first(self, text: str) -> int | None:
        """The best passage, found by ranking all of them."""
        if not self.size:
            return None
        scores = self.index.score([self._query(text)], np.arange(self.size))[0]
        best = int(np.argmax(np.where(self._seen(text), scores, -np.inf)))
        return None if self.kind == "bm25" and scores[best] <= 0 else best


class WatchedExecutor(Executor):
    """Goes on once a search has begun, and tells how many have ended, so that whoever waits for them can go on."""

    def __init__(self) -> None:
        super().__init__()
        self._threads = _Begun(2)
        self.ended = 0
        self.news = threading.Condition()

    @property
    def begun(self) -> threading.Event:
        assert isinstance(self._threads, _Begun)
        return self._threads.begun

    def _wake(self, future: Any) -> None:
        super()._wake(future)
        if isinstance(future.result(), Searched):
            with self.news:
                self.ended += 1
                self.news.notify_all()


class _Begun(SearchThreads):
    """A submission returns when what was submitted says that it has begun, or has ended."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.begun = threading.Event()

    def submit(self, search: Search) -> Future[Any]:
        self.begun.clear()
        future = super().submit(search)
        future.add_done_callback(lambda _: self.begun.set())
        self.begun.wait()
        return future


@dataclass
class Gate:
    """Lets every search end exactly behind the n-th pass that runs during it.

    Attributes:
        patience: seconds after which it ends all the same, where fewer passes run during it.
    """

    model: WholeContextModel
    retriever: ToyRetriever
    executor: WatchedExecutor
    passes: int
    patience: float

    def __post_init__(self) -> None:
        self._may_end = threading.Event()
        self._left = 0
        self.model.on_pass = self._behind_a_pass
        self.retriever.during_search = self._during_search

    def _during_search(self) -> None:
        self._may_end.clear()
        self._left = self.passes
        self.executor.begun.set()
        if self.passes:
            self._may_end.wait(timeout=self.patience)

    def _behind_a_pass(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._may_end.set()
            with self.executor.news:
                self.executor.news.wait_for(
                    lambda: self.executor.ended == len(self.retriever.searches), timeout=5
                )


@dataclass(frozen=True)
class Expected:
    """What the oracle says, in the form of :func:`outcome`."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    passages: tuple[int | None, ...]
    queries: tuple[str, ...]


def outcome(answer: IterativeAnswer) -> Expected:
    """What must not depend on how an answer was made."""
    passages = tuple(
        None if chunk.source is None else answer.sources[chunk.source - 1].passage.id
        for chunk in answer.chunks
    )
    tokens = tuple(token.token for token in answer.tokens)
    return Expected(
        answer.text, tokens, answer.finish_reason, passages, tuple(chunk.query for chunk in answer.chunks)
    )


@dataclass(frozen=True)
class Case:
    """A question and how to answer it."""

    question: str
    interval: int = 4
    query_tokens: int = 8
    passage_tokens: int = 20
    prompt_tokens: int = 64
    max_tokens: int = 24
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
        )

    @property
    def options(self) -> Options:
        """As a call takes them."""
        return {
            "max_tokens": self.max_tokens,
            "stop": self.stop,
            "temperature": self.temperature,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
        }

    @property
    def limits(self) -> dict[str, Any]:
        """As a method takes them."""
        return {
            "interval": self.interval,
            "query_tokens": self.query_tokens,
            "passage_tokens": self.passage_tokens,
            "prompt_tokens": self.prompt_tokens,
        }


def expected(model: WholeContextModel, retriever: ToyRetriever, case: Case, *, chat: bool) -> Expected:
    """The output by the definition, token by token and without any session, cache or stream."""
    tokenizer = toy_tokenizer(chat)
    asked = tokenizer.encode(case.question + ("\n" if chat else ""), special=False)
    tokens: list[int] = []
    passages: list[int | None] = []
    queries: list[str] = []
    text, reason = "", ""
    prompt: list[int] = []
    while not reason:
        place = len(tokens)
        if place % case.interval == 0:
            window = [*asked, *tokens]
            query = tokenizer.decode(window[-case.query_tokens :]).strip()
            queries.append(query or tokenizer.decode(window).strip() or case.question)
            passages.append(retriever.first(queries[-1]))
            prompt = _prompt(tokenizer, retriever, case, passages[-1], chat)
            params = replace(case.sampling, seed=chunk_seed(case.seed, place))
        context = [*prompt, *tokens]
        chain = build_processors(params)
        state = chain.start(prompt)
        for token in tokens:
            state = chain.advance(state, token)
        tokens.append(choose(chain.apply(model.logits(context), state), params, len(context)))
        text = tokenizer.decode(tokens)
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in case.stop if stop in text]
        if tokens[-1] == END:
            reason = "stop"
        elif len(tokens) == case.max_tokens:
            reason = "length"
        if found:
            text, reason = text[: min(found)[1]], "stop"
    return Expected(text, tuple(tokens), reason, tuple(passages), tuple(queries))


def _prompt(
    tokenizer: Tokenizer, retriever: ToyRetriever, case: Case, passage: int | None, chat: bool
) -> list[int]:
    words = []
    if passage is not None:
        words = tokenizer.encode(retriever.texts[passage], special=False)[: case.passage_tokens]
    while True:
        kept = tokenizer.decode(words).rstrip(chr(0xFFFD)).strip()
        content = f"{kept}\n\n{case.question}" if kept else case.question
        if chat:
            tokens = tokenizer.chat([{"role": "user", "content": content}])
        else:
            tokens = tokenizer.encode(content, special=True)
        if len(tokens) <= case.prompt_tokens:
            return tokens
        words = words[: len(words) - (len(tokens) - case.prompt_tokens)]
