"""What a command answers with: models, folders and endpoints by the names that users type, opened when needed."""

from __future__ import annotations

import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrag.cli import common
from specrag.language_model import OpenResources

if TYPE_CHECKING:
    from specrag.cli.render import SourceColours
    from specrag.cli.values import ModelValues
    from specrag.engine import Coroutine, Task
    from specrag.language_model import LanguageModel
    from specrag.methods import Method
    from specrag.models import Tokenizer
    from specrag.request import Result


#: Seconds of loading after which a command says how the next one can avoid it.
_LONG = 10.0

#: Bytes for keys and values of a chat's earlier turns.
_KEPT = 512 * 2**20


class LocalResources(OpenResources):
    """Loads the model when a method asks for it, and opens whatever an option names.

    Args:
        model: its name.
        values: how it and other models are loaded.
        opened: closes what has been opened.
        given: as for :class:`~specrag.methods.resources.Resources`.
    """

    def __init__(self, model: str, values: ModelValues, opened: ExitStack, **given: Any) -> None:
        super().__init__(None, **{"holds_documents": False, **given})
        self._model = model
        self._values = values
        self._loaded: LanguageModel | None = None
        self._approximate = False
        opened.callback(self.close)

    @property
    def llm(self) -> LanguageModel:
        """The model, loaded on first use."""
        if self._loaded is None:
            self._loaded = self._load(self._model, self._values.adapter)
            self._llm = self._loaded
        return self._loaded

    def load(self, name: str, adapter: str | None) -> LanguageModel:
        """Load a model by name, as the options say."""
        return self._load(name, adapter)

    def _is_own(self, name: str) -> bool:
        return name == self._model

    def close(self) -> None:
        """Close what has been opened, and the model."""
        super().close()
        if self._loaded is not None:
            self._loaded.close()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; ``None`` if endpoints have written everything."""
        return None if self._loaded is None else self._loaded.tokenizer

    def describe(self) -> dict[str, Any]:
        """Describe the model for programs."""
        if self._loaded is None:
            return {"model": None, "dtype": None, "device": None}
        loaded = self._loaded.loaded
        return {"model": loaded.name, "dtype": loaded.dtype, "device": loaded.device}

    def colours(self, wanted: bool) -> SourceColours | None:
        """An object that colours text by the source of its tokens; ``None`` if unwanted, or without a loaded model."""
        from specrag.cli.render import SourceColours
        from specrag.models import TextStream

        return (
            SourceColours(TextStream(self._loaded.tokenizer)) if wanted and self._loaded is not None else None
        )

    def submit(self, coroutine: Coroutine[Result], seconds: float | None) -> Task[Result]:
        """Start an answer.

        Args:
            seconds: after which it ends with an error.
        """
        deadline = None if seconds is None else self.clock() + seconds
        return self.executor.submit(coroutine, deadline=deadline)

    def check(self, method: Method) -> None:
        """Open what the method's options name before a model is loaded, and note whether it reuses approximately.

        Raises:
            SpecragError: it cannot be opened.
        """
        self._approximate = getattr(method.options, "reuse", "exact") != "exact"
        openers = {"datastores": self.datastore, "corpora": self.corpus}
        for name, field in type(method.options).model_fields.items():
            extra = field.json_schema_extra
            opener = openers.get(str(extra.get("resource"))) if isinstance(extra, dict) else None
            if opener is not None:
                opener(getattr(method.options, name))

    def _load(self, name: str, adapter: str | Path | None) -> LanguageModel:
        from specrag.language_model import load

        values = self._values
        began = self.clock()
        with common.status(f"loading {name}") if _is_here(name) else nullcontext():
            llm = load(
                name,
                dtype=values.dtype,
                device=values.device,
                adapter=adapter,
                batch_invariant=values.batch_invariant,
                kv_dtype=values.kv_dtype,
                progress=True,
            )
        # Without batch invariance, a text after a kept prompt may differ from one after a prompt that is read again.
        if llm.loaded.batch_invariant or self._approximate:
            llm.prefixes.limit_bytes = _KEPT
        if sys.stderr.isatty() and not llm.loaded.batch_invariant:
            sys.stderr.write(f"note: {llm.loaded.exactness}\n")
        took = self.clock() - began
        if sys.stderr.isatty() and took > _LONG:
            sys.stderr.write(f"note: loading took {took:.0f} s; specrag serve --background keeps the model\n")
        return llm


def _is_here(name: str) -> bool:
    """Whether the model is here already; fetching it would show progress bars of its own."""
    from specrag.models.catalog import Store, catalog_name, home

    return Path(name).expanduser().exists() or Store(home()).manifest(catalog_name(name)) is not None


def open_passages(kb: str, opened: ExitStack, index: str | None, where: Any) -> Any:
    """Open a knowledge base by its folder, or a store by its address.

    Args:
        index: for a store: flat or hnsw; for folders as shards also bm25 and hybrid.
        where: conditions, for a store.

    Raises:
        SpecragError: it cannot be opened.
    """
    from specrag.retrieval.stores import is_address

    if not is_address(kb):
        from specrag.retrieval import KnowledgeBase

        return opened.enter_context(KnowledgeBase.open(Path(kb).expanduser()))
    from specrag.retrieval.stores import QuestionSearch, open_store

    return opened.enter_context(QuestionSearch(open_store(kb, index=index, where=where or None)))
