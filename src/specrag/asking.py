"""Ask a question in one call, and answer without a local model."""

from __future__ import annotations

from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from specrag.language_model import OpenResources, is_endpoint, load
from specrag.methods import Call, Facade, Resources

if TYPE_CHECKING:
    from specrag.language_model import LanguageModel
    from specrag.models import TextGenerator, TextScorer
    from specrag.request import Prompt, Result


class Answerer(Facade):
    """Answers with any resources, such as models that are all behind endpoints.

    Args:
        resources: what to answer with; the caller keeps ownership and closes it.
    """

    def __init__(self, resources: Resources) -> None:
        self.resources = resources


def ask(
    question: Prompt,
    *,
    model: LanguageModel | str | Path | None = None,
    drafter: TextGenerator | LanguageModel | str | None = None,
    verifier: TextScorer | LanguageModel | str | None = None,
    **call: Unpack[Call],
) -> Result:
    """Answer a question.

    Models given by name are loaded at the first call and stay in memory; to load one with other settings, use
    :func:`specrag.load`.

    Args:
        question: a question in words, or a conversation that ends with one.
        model: a catalog name, a folder, or a loaded model; by default the best that this machine can run
            (``SPECRAG_MODEL`` names another), or none if both drafter and verifier are given.
        drafter: writes the drafts of Speculative RAG: a name, an address such as ``http://HOST:PORT/v1#MODEL``, a
            loaded model or an open endpoint; by default the model.
        verifier: scores the drafts; by default the model.
        call: the arguments of every call (:class:`~specrag.methods.facade.Call`): ``kb`` for where to search,
            ``method`` such as ``"speculative-rag"``, ``k``, ``max_tokens`` and so on.

    Raises:
        InputError: a value cannot be used.
        ContextLengthError: the question does not fit the model's context.
        DeadlineExceeded: the timeout passed.
        SpecragError: a model cannot be loaded, or an endpoint does not answer.
    """
    if model is not None or drafter is None or verifier is None:
        host: Resources = _loaded(model or _default()).resources
        return Answerer(host.beside(_loaded(drafter), _loaded(verifier))).generate(question, **call)
    with closing(OpenResources(drafter=_loaded(drafter), verifier=_loaded(verifier))) as host:
        return Answerer(host).generate(question, **call)


def _default() -> str:
    from specrag.models.catalog import default_model

    return default_model()


def _loaded(model: Any) -> Any:
    return _load(str(model)) if isinstance(model, str | Path) else model


@lru_cache(maxsize=4)
def _load(name: str) -> Any:
    if is_endpoint(name):
        from specrag.models.endpoint import open_endpoint

        return open_endpoint(name)
    return load(name)
