"""The plan of kNN-LM: a datastore is searched for every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrag.errors import InputError
from specrag.serving.method_options import KnnOptions
from specrag.serving.passage_plans import plan_answer
from specrag.serving.plans import Ask, Plan, plan_text

if TYPE_CHECKING:
    from specrag.methods.knn_lm import KnnLM
    from specrag.retrieval.knn_datastore import Datastore


def plan_knn(ask: Ask, options: KnnOptions) -> Plan:
    """A text, or with a knowledge base standard RAG's answer, written by kNN-LM.

    Raises:
        InputError: there is no such datastore, it lacks neighbours or the index, or an option is of guesses where
            nothing is guessed.
    """
    given = options.model_dump(include={"asynchronous", "decoder"}, exclude_unset=True)
    for name, value in given.items():
        if value and options.stride == "sequential":
            remedy = "nothing is guessed with a stride of sequential; leave it out"
            raise InputError(f"specrag.options.{name}", value, remedy)
    datastore, chosen = _datastore(ask, options.datastore), options.model_dump_json(exclude={"datastore"})
    method = ask.methods.get(_method, datastore, chosen)
    return plan_text(ask, method) if ask.kb is None else plan_answer(ask, method)


def _datastore(ask: Ask, name: str | None) -> Datastore:
    names = sorted(ask.datastores)
    if name is None and len(names) == 1:
        name = names[0]
    if name is None or name not in ask.datastores:
        remedy = f"take one of {', '.join(names)}" if names else "there is none here"
        raise InputError("specrag.options.datastore", name, remedy)
    return ask.datastores[name]


def _method(datastore: Datastore, options: str) -> KnnLM:
    from specrag.methods.knn_lm import KnnLM
    from specrag.methods.knn_mixture import Mixture

    chosen = KnnOptions.model_validate_json(options)
    k = min(Mixture().k, len(datastore)) if chosen.k is None else chosen.k
    return KnnLM(
        datastore,
        Mixture(k, chosen.weight, chosen.knn_temperature, chosen.knn_reach),
        index=chosen.index,
        stride=None if chosen.stride == "sequential" else chosen.stride,
        decoder=chosen.decoder,
        asynchronous=chosen.asynchronous,
    )
