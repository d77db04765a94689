"""What all requests share: model and executor, encoder, knowledge bases, admission and memory."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from specrag.engine import in_own_thread
from specrag.errors import InputError, SpecragError
from specrag.methods import NO_ADAPTER, Resources, SharedMethods
from specrag.retrieval.encoder import Encoders
from specrag.serving.errors import ApiError, unknown_model
from specrag.serving.knowledge.bases import Base, KnowledgeBases
from specrag.serving.listings import Names
from specrag.serving.operation.admission import Admission
from specrag.serving.served import LocalServed, RemoteServed, Served
from specrag.serving.upstreams import Upstreams, refuse_sessions

if TYPE_CHECKING:
    from specrag.language_model import LanguageModel
    from specrag.methods.knn_lm.store import Datastore
    from specrag.models import GrammarVocabulary, LoadedModel
    from specrag.retrieval.encoder import Encoder, Reranker
    from specrag.serving.openai.answering import RunningTexts
    from specrag.serving.operation.metrics import FinishedGeneration
    from specrag.serving.settings import Settings
    from specrag.speculation.suffix import SuffixCorpus

#: Default size of the prefix cache: 1/KEPT_PART of the memory for keys and values, at most MOST_KEPT bytes.
KEPT_PART, MOST_KEPT = 5, 4 * 2**30

#: Bytes for the prefix cache if the amount of free memory is unknown.
KEPT_IF_UNKNOWN = 256 * 2**20


@dataclass(frozen=True, slots=True)
class KeyValueMemory:
    """Bytes for keys and values.

    Attributes:
        running: for all running requests; ``None`` for no limit.
        kept: for the prefix cache, which serves requests that begin with the same tokens as earlier ones.
    """

    running: int | None
    kept: int


def divide(settings: Settings, free: int | None) -> KeyValueMemory:
    """Divide the memory according to the settings ``kv_memory_bytes`` and ``prefix_cache_bytes``.

    Args:
        free: bytes that are free once everything is loaded; ``None`` if the system does not say.
    """
    total = settings.kv_memory_bytes
    if total is None and free is not None:
        total = free // 2
    kept = settings.prefix_cache_bytes
    if kept is None:
        kept = KEPT_IF_UNKNOWN if total is None else min(total // KEPT_PART, MOST_KEPT)
    return KeyValueMemory(None if total is None else max(total - kept, 0), kept)


State = Literal["loading", "ready", "failed", "stopping"]

#: Rows of a prompt in one pass, and rows of a whole pass. Smaller than in a program: other requests wait for a pass.
PREFILL_ROWS, PASS_ROWS = 256, 512

#: Requests checked and tokenized at the same time; more would only take turns.
PREPARED = 2

_log = logging.getLogger("specrag.serving")


class Service:
    """One server's working parts.

    Args:
        settings: already checked.
        encoders: the server's; by default they are loaded in this process.

    Attributes:
        admission: places, queue and memory.
        preparations: the queue for checking and tokenizing requests.
        encodings: the queue for embeddings, computed one call at a time: they take the processors from all passes.
        observers: called in the event loop with the figures of every finished answer.
        searches: called with the seconds and the number of passages of every search.
        knowledge_bases: by name; closed by the code that set them.
        created: start time in seconds since 1970.
        upstreams: the endpoints that answer in place of a local model; ``None`` for a model on this machine.
        rag_drafter: writes the drafts of Speculative RAG; ``None`` if the model itself does.
        running: the running texts, which are ended when the server stops.
        failure: why the model could not be loaded.
        ended_by_failure: called in the event loop if loading failed, since the server is then of no use.
    """

    def __init__(self, settings: Settings, encoders: Encoders | None = None) -> None:
        self.settings = settings
        self.state: State = "loading"
        self.failure: Exception | None = None
        self.ended_by_failure: Callable[[], object] | None = None
        self.admission = Admission(settings.max_concurrent, settings.max_queue, None)
        self.encodings = Admission(1, settings.max_queue, None)
        self.preparations = Admission(PREPARED, settings.max_queue, None)
        self.observers: list[Callable[[FinishedGeneration], None]] = []
        self.encoders = encoders or Encoders()
        self.knowledge_bases = KnowledgeBases(settings, self.encoders)
        self._datastores: dict[str, Datastore] = {}
        self._corpora: dict[str, SuffixCorpus] = {}
        self.created = int(time.time())
        self._llm: LanguageModel | None = None
        self.upstreams = Upstreams(settings) if settings.upstreams else None
        self._shared = SharedMethods()  # for requests to upstreams; a local model has its own
        self.rag_drafter: LanguageModel | None = None
        self._loading: asyncio.Task[None] | None = None
        self.running: set[RunningTexts] = set()
        self.searches: Callable[[float, int], None] | None = None
        self.packed_passes: Callable[[int, int], None] | None = None

    # -- life -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start loading in a thread; call this in the event loop."""
        self._loading = asyncio.get_running_loop().create_task(self._load())

    async def _load(self) -> None:
        try:
            await asyncio.to_thread(in_own_thread, self.load)
        except Exception as error:
            self.state = "failed"
            self.failure = error
            _log.error("loading failed: %s", error, exc_info=not isinstance(error, SpecragError))
            if self.ended_by_failure is not None:
                self.ended_by_failure()

    def load(self) -> None:
        """Load the model and open the knowledge bases; takes seconds.

        Raises:
            SpecragError: a model or a knowledge base cannot be used.
        """
        from specrag.methods import method_class

        settings = self.settings
        method = method_class(settings.method, "method")
        for name in settings.kbs:
            self.knowledge_bases.get(name)
        if settings.reranker is not None:
            self.encoders.reranker(settings.reranker)
        if self.upstreams is not None:
            refuse_sessions(method, "method")
            self.upstreams.connect()
        else:
            self._load_model()
        # Otherwise a full collection scans everything imported and loaded, which stalls requests for half a second.
        gc.collect()
        gc.freeze()
        if self.state == "loading":
            self.state = "ready"

    def _load_model(self) -> None:
        """Load the model and everything that belongs to it."""
        from specrag.engine import free_bytes
        from specrag.language_model import LanguageModel

        settings = self.settings
        loaded = _load(settings, settings.model, settings.adapter)
        _log.info("%s: %s", loaded.name, loaded.exactness)
        for name, folder in settings.datastores.items():
            self._datastores[name] = _open_datastore(folder, loaded)
        for name, folder in settings.corpora.items():
            self._corpora[name] = _open_corpus(folder, loaded)
        self.rag_drafter = _load_drafter(settings)
        memory = divide(settings, free_bytes(loaded.device))  # after loading, so that weights do not count
        llm = LanguageModel(
            loaded,
            prefix_cache_bytes=memory.kept,
            max_rows=PASS_ROWS,
            prefill_rows=PREFILL_ROWS,
        )
        _warm_up(llm, settings)
        if self.packed_passes is not None:
            llm.executor.on_pass = self.packed_passes
        self._llm = llm
        # Otherwise the first request with a schema builds it, in one step that blocks all other threads.
        _ = self.grammars.backend
        self.admission.budget = memory.running

    def check_loaded(self) -> None:
        """Check that requests can be answered.

        Raises:
            ApiError: 503 while loading, or if loading failed.
        """
        if self.state in ("loading", "failed"):
            if self.state == "failed":  # the reason may name a folder of this machine
                message, code = "the model cannot be loaded; the server's log says why", "failed"
            else:
                message, code = "the model is being loaded; try again in a moment", "loading"
            raise ApiError(503, message, code=code, headers={"Retry-After": "5"})

    @property
    def llm(self) -> LanguageModel:
        """The model on this machine.

        Raises:
            ApiError: 503 if there is none, or it is not loaded.
        """
        self.check_loaded()
        if self._llm is None:
            raise ApiError(503, "the server has no model of its own", code="failed")
        return self._llm

    def served(self, model: str) -> Served:
        """The model or pool that writes a request's texts.

        Args:
            model: one of the ids of :meth:`model_ids`.

        Raises:
            ApiError: 503 if it is not loaded.
        """
        self.check_loaded()
        if self.upstreams is None:
            return LocalServed(self.settings.name, self.llm)
        name = model if model in self.upstreams.names else model.rpartition("@")[0]
        return RemoteServed(name, self.upstreams.model(name))

    @cached_property
    def grammars(self) -> GrammarVocabulary:
        """Builds grammars over the model's tokens."""
        from specrag.models import GrammarVocabulary

        llm = self._llm or self.llm  # the latter raises the reason if there is none
        return GrammarVocabulary(llm.tokenizer, llm.model.vocab_size)

    def encoder(self) -> Encoder:
        """The sentence encoder of ``/v1/embeddings``, loaded on first use; takes a second then."""
        return self.encoders.encoder(self.settings.encoder)

    def reranker(self, name: str) -> Reranker:
        """The server's cross-encoder.

        Raises:
            InputError: the server has none of this name.
            ModelFilesError: its files are missing or damaged.
        """
        if name != self.settings.reranker:
            none = self.settings.reranker is None
            raise InputError("rerank", name, "this server has none" if none else "GET /v1/models lists one")
        return self.encoders.reranker(name)

    def begin_stop(self, seconds: float) -> None:
        """Stop admitting requests, and end the running ones after ``seconds``; call this in the event loop."""
        if self.state != "stopping":
            self.state = "stopping"
            self.admission.close()
            self.encodings.close()
            self.preparations.close()
            asyncio.get_running_loop().call_later(seconds, self._end_running)

    def _end_running(self) -> None:
        for texts in list(self.running):
            texts.interrupt(
                ApiError(503, "the server is being stopped", code="stopping", headers={"Retry-After": "10"})
            )

    async def close(self) -> None:
        """End the remaining work and release models and files."""
        self.state = "stopping"
        self.admission.close()
        if self._loading is not None:
            with suppress(asyncio.CancelledError):
                await self._loading  # a thread cannot be cancelled
        if self.upstreams is not None:
            await asyncio.to_thread(self.upstreams.close)
        for llm in (self._llm, self.rag_drafter):
            if llm is not None:
                await asyncio.to_thread(llm.close)
        if self._llm is not None:
            self._llm.shared.clear()  # it holds datastores and corpora
        for opened in (self._datastores, self._corpora):
            while opened:
                opened.popitem()[1].close()

    # -- what requests ask ------------------------------------------------------------------------------------

    def model_ids(self, may_read: Callable[[str], bool]) -> list[str]:
        """Ids that a request's ``model`` may have: ``MODEL``, and ``MODEL@KB`` per knowledge base; reads folders."""
        kbs = ["", *(f"@{kb}" for kb in self.knowledge_bases.names() if may_read(kb))]
        return [f"{name}{kb}" for name in self.model_names for kb in kbs]

    @property
    def model_names(self) -> list[str]:
        """Names of the models that write texts."""
        return [self.settings.name] if self.upstreams is None else self.upstreams.names

    def is_model(self, model: str) -> bool:
        """Whether this names a model alone, without a knowledge base."""
        return model in self.model_names or (self.upstreams is None and model == self.settings.model)

    def kb_of(self, model: str, may_read: Callable[[str], bool]) -> str | None:
        """The knowledge base that a model's id names; ``None`` for the model alone. Reads folders.

        Raises:
            ApiError: nothing of this name is served to the caller.
        """
        if self.is_model(model):
            return None
        name, _, kb = model.rpartition("@")
        if self.is_model(name) and may_read(kb) and kb in self.knowledge_bases:
            return kb
        raise unknown_model(model, self.model_ids(may_read))

    def resources(self, model: Served, kb: str | None, may_read: Callable[[str], bool]) -> Resources:
        """The resources that a request may be answered with.

        Args:
            model: the model that the request names.
            kb: the knowledge base that it names.

        Raises:
            InputError: there is no knowledge base of this name that the caller may read.
        """
        retriever = None if kb is None else self.knowledge_base(kb, may_read)
        if self.upstreams is not None:
            return Resources(
                generator=model.generator,
                retriever=retriever,
                drafter=self.upstreams.drafter(model.name),
                verifier=self.upstreams.verifier(model.name),
                drafters=(),
                load_reranker=self.reranker,
                shared=self._shared,
                holds_documents=False,
            )
        return Resources(
            self.llm,
            retriever=retriever,
            drafter=self.rag_drafter,
            datastores=self.datastores_of(may_read),
            corpora=self.corpora_of(may_read),
            drafters=self.settings.drafters,
            load_reranker=self.reranker,
            holds_documents=False,
        )

    def names(self, may_read: Callable[[str], bool]) -> Names:
        """The names that method options may use; known even while the model is loading."""
        settings = self.settings
        return Names(
            sorted(filter(may_read, settings.datastores)),
            sorted(filter(may_read, settings.corpora)),
            settings.drafters,
            [] if settings.reranker is None else [settings.reranker],
            sessions=self.upstreams is None,
            small_model=settings.rag_drafter is not None,
        )

    def datastores_of(self, may_read: Callable[[str], bool]) -> dict[str, Datastore]:
        """The datastores that the caller may search, by name."""
        return {name: datastore for name, datastore in self._datastores.items() if may_read(name)}

    def corpora_of(self, may_read: Callable[[str], bool]) -> dict[str, SuffixCorpus]:
        """The corpora that guesses may be copied from, by name; limited, since answer times reveal copied guesses."""
        return {name: corpus for name, corpus in self._corpora.items() if may_read(name)}

    def knowledge_base(self, name: str, may_read: Callable[[str], bool]) -> Base:
        """A knowledge base that the caller may read.

        Raises:
            InputError: there is none of this name that the caller may read.
        """
        if may_read(name):
            with suppress(KeyError):
                return self.knowledge_bases.get(name)
        raise InputError("specrag.kb", name, "there is no knowledge base of this name; GET /v1/kb lists them")


def split_drafter(given: str) -> tuple[str, str | None]:
    """Model and adapter of the setting ``rag_drafter``; the adapter ``plain`` is none.

    Raises:
        InputError: one of them is empty.
    """
    # A folder's name may contain a plus sign.
    name, plus, adapter = (given, "", "") if Path(given).expanduser().is_dir() else given.partition("+")
    if not name or (plus and not adapter):
        raise InputError("rag_drafter", given, "give MODEL or MODEL+ADAPTER")
    return name, None if adapter == NO_ADAPTER else adapter or None


def _load(settings: Settings, name: str, adapter: str | Path | None) -> LoadedModel:
    from specrag.models import load_model

    return load_model(
        name,
        dtype=settings.dtype,
        device=settings.device,
        adapter=adapter,
        batch_invariant=settings.batch_invariant,
        kv_dtype=settings.kv_dtype,
    )


def _load_drafter(settings: Settings) -> LanguageModel | None:
    """Load the model that writes drafts; its passes run on the served model's executor."""
    from specrag.language_model import LanguageModel

    if settings.rag_drafter is None:
        return None
    name, adapter = split_drafter(settings.rag_drafter)
    loaded = _load(settings, name, adapter)
    llm = LanguageModel(loaded, prefill_rows=PREFILL_ROWS)
    llm.generate("Hello", max_tokens=2)
    return llm


def _open_datastore(folder: Path, loaded: LoadedModel) -> Datastore:
    from specrag.methods.knn_lm.store import Datastore, model_record

    datastore = Datastore.open(folder)
    datastore.check_model(model_record(loaded))
    return datastore


def _open_corpus(folder: Path, loaded: LoadedModel) -> SuffixCorpus:
    from specrag.speculation.suffix import SuffixCorpus

    corpus = SuffixCorpus.open(folder)
    corpus.require_tokenizer(loaded.tokenizer.fingerprint)
    return corpus


def _warm_up(llm: LanguageModel, settings: Settings) -> None:
    """Load the drafters and generate a short text, so that no request waits for loading or for loops to compile."""
    from specrag.methods import Adaptive, decoder_names

    for drafter in settings.drafters:
        # Generates nothing: the cost of a first pass is no measure of the drafter.
        Adaptive(drafter=drafter).decoder(llm.resources).check(llm.loaded)
    usual = settings.method if settings.method in decoder_names() else Adaptive()
    llm.generate("Hello", max_tokens=2, method=usual)
