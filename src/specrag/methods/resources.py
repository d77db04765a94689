"""What a method may use: a model, passages, datastores, other models; and what requests learn together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Mapping
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from specrag.checks import check_choice
from specrag.errors import InputError

if TYPE_CHECKING:
    from specrag.engine import Executor
    from specrag.methods.base import Generator, LocalModel
    from specrag.methods.knn_lm.store.datastore import Datastore
    from specrag.methods.prefixes import KeptPrefixes
    from specrag.methods.rapid.context.retriever import ContextRetriever, ContextSettings
    from specrag.methods.retriever import PassageRetriever, Retriever
    from specrag.models import TextGenerator, TextScorer
    from specrag.retrieval.encoder import Reranker
    from specrag.speculation.suffix import SuffixCorpus

T = TypeVar("T")

#: Given instead of an adapter: the unmodified model.
NO_ADAPTER = "plain"


class SharedMethods:
    """Configured methods, one for all equal requests, so that requests learn together what things cost.

    The methods hold the datastores and corpora that they read: before closing these, clear the methods.
    """

    def __init__(self) -> None:
        self._made = lru_cache(maxsize=64)(_call)
        # By identity: a retriever may be equal to another one, or have no hash.
        self._learned: dict[int, dict[Hashable, Any]] = {}
        self._few = lru_cache(maxsize=4)(_call)

    def get(self, make: Callable[..., T], *words: Any) -> T:
        """What ``make`` returns for these hashable words; the same object as long as it is remembered."""
        made: T = self._made(make, *words)
        return made

    def few(self, make: Callable[..., T], *words: Hashable) -> T:
        """The same for objects that take much memory, such as an encoder; only the newest few are remembered."""
        made: T = self._few(make, *words)
        return made

    def learned(self, owner: object, make: Callable[[], T], *words: Hashable) -> T:
        """What requests over the same passages learn; discarded with the passages.

        Args:
            owner: what the requests search.
            make: makes the object.
        """
        if id(owner) not in self._learned:
            try:
                weakref.finalize(owner, self._learned.pop, id(owner), None).atexit = False
            except TypeError:  # it cannot be weakly referenced, so its end would go unnoticed
                return make()
            self._learned[id(owner)] = {}
        known = self._learned[id(owner)]
        if (make, *words) not in known:
            known[(make, *words)] = make()
        found: T = known[(make, *words)]
        return found

    def clear(self) -> None:
        """Forget all of them."""
        self._made.cache_clear()
        self._few.cache_clear()
        self._learned.clear()


def _call(make: Callable[..., T], *words: Hashable) -> T:
    return make(*words)


class Resources:
    """What is available for answering.

    Args:
        llm: the local model; ``None`` if all models are behind endpoints.
        retriever: a knowledge base, a table, or passages that somebody else has found.
        generator: writes answers if there is no local model, such as one behind endpoints.
        drafter: writes drafts of Speculative RAG; by default the model.
        verifier: scores them; by default the model.
        datastores: kNN-LM datastores, by name.
        corpora: texts that guesses may be copied from, by name.
        drafters: names of models and heads that may be loaded to draft tokens; ``None`` for any.
        load_reranker: returns a cross-encoder by name; by default any that is found.
        shared: what requests learn together; by default the model's.
        holds_documents: keep the newest long text's keys and values for the next question.
    """

    #: Whether options may name what was not given: models, folders, endpoints.
    opens_by_name = False

    def __init__(  # noqa: PLR0913 - what there may be, each of another kind
        self,
        llm: LocalModel | None = None,
        *,
        generator: Generator | None = None,
        retriever: Retriever | PassageRetriever | None = None,
        drafter: TextGenerator | LocalModel | None = None,
        verifier: TextScorer | LocalModel | None = None,
        datastores: Mapping[str, Datastore] | None = None,
        corpora: Mapping[str, SuffixCorpus] | None = None,
        drafters: Collection[str] | None = None,
        load_reranker: Callable[[str], Reranker] | None = None,
        shared: SharedMethods | None = None,
        holds_documents: bool = True,
    ) -> None:
        self._llm = llm
        self._generator = generator
        self.retriever = retriever
        self._drafter = drafter
        self._verifier = verifier
        self.datastores = dict(datastores or {})
        self.corpora = dict(corpora or {})
        self.drafters = drafters
        self._load_reranker = load_reranker
        self.shared = shared or (SharedMethods() if llm is None else llm.shared)
        self.holds_documents = holds_documents
        self._own: list[Executor] = []  # one at most; copies of this object share it

    def over(self, retriever: Retriever | PassageRetriever | None) -> Resources:
        """The same resources over other passages; itself if none are given."""
        if retriever is None:
            return self
        other = copy(self)
        other.retriever = retriever
        return other

    def beside(
        self, drafter: TextGenerator | LocalModel | None, verifier: TextScorer | LocalModel | None
    ) -> Resources:
        """The same resources with another drafter and verifier of answers; itself if none are given."""
        if drafter is None and verifier is None:
            return self
        other = copy(self)
        other._drafter, other._verifier = drafter or self._drafter, verifier or self._verifier
        return other

    @property
    def clock(self) -> Callable[[], float]:
        """The executor's clock, in seconds."""
        return self.executor.clock

    @property
    def llm(self) -> LocalModel:
        """The local model.

        Raises:
            InputError: there is none.
        """
        if self._llm is None:
            raise InputError("model", None, "this method decodes a local model; name one")
        return self._llm

    @property
    def generator(self) -> Generator:
        """The model that writes answers: the local model, or its replacement.

        Raises:
            InputError: there is neither.
        """
        return self.llm if self._generator is None else self._generator

    @property
    def has_model(self) -> bool:
        """Whether there is a local model."""
        return self._llm is not None

    def of(self, llm: LocalModel) -> Resources:
        """The same resources for another model; itself if it is the same model."""
        if llm is self._llm:
            return self
        other = copy(self)
        other._llm, other.shared = llm, llm.shared
        return other

    @property
    def drafter(self) -> TextGenerator | LocalModel | None:
        """The model that the host chose to write drafts; ``None`` if it chose none."""
        return self._drafter

    def writer(
        self,
        name: str | None = None,
        adapter: str | None = None,
        form: str = "paper",  # noqa: ARG002 - of the adapters that a host may choose from
    ) -> TextGenerator | LocalModel:
        """The model that writes drafts of answers: the host's drafter, or the local model.

        Args:
            name, adapter: of another one, if the host loads models that requests name.
            form: of the drafts; among the adapters that come with a model, the one for this form is taken.

        Raises:
            InputError: one is named, but the host loads none on request.
        """
        for field, value in (("drafter", name), ("adapter", adapter)):
            self._refuse_name(field, value)
        return self._drafter or self.llm

    def scorer(self, name: str | None = None) -> TextScorer | LocalModel:
        """The model that scores drafts: the host's verifier, or the local model.

        Args:
            name: of another one, if the host loads models that requests name.

        Raises:
            InputError: one is named, but the host loads none on request.
        """
        self._refuse_name("verifier", name)
        return self._verifier or self.llm

    def folder(self, path: str | None, field: str) -> Path | None:
        """A folder to write to, if the host lets requests name one.

        Raises:
            InputError: one is named, but the host does not let requests do so.
        """
        self._refuse_name(field, path)
        return None

    def _refuse_name(self, field: str, value: str | None) -> None:
        if value is not None:
            raise InputError(field, value, "leave it out; the host decides it")

    @property
    def executor(self) -> Executor:
        """Runs the coroutines: the model's executor, or an endpoint's own."""
        from specrag.engine import Executor

        for model in (self._llm, self._generator, self._drafter, self._verifier):
            found: Executor | None = getattr(model, "executor", None)
            if found is not None:
                return found
        if not self._own:
            self._own.append(Executor())
        return self._own[0]

    def close(self) -> None:
        """Stop the executor that runs without a local model; models remain their owners' responsibility."""
        while self._own:
            self._own.pop().close()

    def passages(self, name: str) -> Any:
        """What a method searches.

        Args:
            name: of the method, for the error.

        Raises:
            InputError: there is nothing to search.
        """
        if self.retriever is None:
            raise InputError("kb", None, f"name a knowledge base; {name} answers from one")
        return self.retriever

    def datastore(self, name: str | None, field: str = "datastore") -> Datastore:
        """A kNN-LM datastore; if the name is left out, the only one.

        Raises:
            InputError: there is none of this name.
        """
        if name is None and len(self.datastores) == 1:
            return next(iter(self.datastores.values()))
        if name is None or name not in self.datastores:
            raise InputError(
                field, name, self._choose(self.datastores, "a folder made by specrag index --knn-lm")
            )
        return self.datastores[name]

    def corpus(self, name: str | None, field: str = "corpus") -> SuffixCorpus | None:
        """A corpus that guesses may be copied from; ``None`` if the name is left out.

        Raises:
            InputError: there is none of this name.
        """
        if name is None:
            return None
        if name not in self.corpora:
            raise InputError(
                field, name, self._choose(self.corpora, "a folder made by specrag index --corpus")
            )
        return self.corpora[name]

    def _choose(self, known: Collection[str], otherwise: str) -> str:
        if known:
            return f"take one of {', '.join(sorted(known))}"
        # A host that lists what it lends does not accept folders.
        return f"there is none here; give {otherwise}" if self.drafters is None else "there is none here"

    def check_drafter(self, name: str, own: Collection[str], field: str = "drafter") -> None:
        """Check that a drafter may be used.

        Args:
            own: names that need no other model.

        Raises:
            InputError: it may not.
        """
        if self.drafters is not None:
            check_choice(field, name, (*own, *self.drafters))

    def learned(self, make: Callable[[], T], *words: Hashable) -> T:
        """What requests over the same passages learn together."""
        return self.shared.learned(self.retriever, make, *words)

    def reranker(self, name: str | None) -> Reranker | None:
        """A cross-encoder by name.

        Raises:
            SpecragError: it cannot be loaded.
        """
        if name is None:
            return None
        if self._load_reranker is not None:
            return self._load_reranker(name)
        from specrag.retrieval.encoder import load_reranker

        return self.shared.get(load_reranker, name)

    def context_retriever(self, settings: ContextSettings, folder: Path | None) -> ContextRetriever:
        """The retriever of the relevant parts of long contexts.

        Args:
            settings: how it retrieves.
            folder: stores vectors.
        """
        return self.shared.few(_context_retriever, settings, folder)

    def kept_prefixes(self, folder: Path | None) -> KeptPrefixes | None:
        """Holds the keys and values of the newest long text, so that a second question does not read it again.

        Args:
            folder: also stores them on disk.
        """
        if not self.holds_documents and folder is None:
            return None
        return self.shared.get(_kept_prefixes, self.llm, folder)


def _context_retriever(settings: ContextSettings, folder: Path | None) -> ContextRetriever:
    from specrag.methods.rapid.context.retriever import ContextRetriever

    return ContextRetriever(settings, vectors=folder)


def _kept_prefixes(llm: LocalModel, folder: Path | None) -> KeptPrefixes:
    from specrag.methods.prefixes import KeptPrefixes

    return KeptPrefixes(llm.loaded, llm.prefixes, folder=folder, clock=llm.clock)
