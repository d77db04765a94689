"""The methods that a request may choose: one table, which the page reads too.

To serve another method, add its options to ``method_options.py``, a plan and an entry here, and to ``outcome.py`` and
``events.py`` what its result and its events are to clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from specrag.errors import InputError
from specrag.methods.fallbacks import DRAFTERS
from specrag.methods.registry import check_method
from specrag.serving import passage_plans
from specrag.serving.knn_plan import plan_knn
from specrag.serving.method_options import (
    KnnOptions,
    NoOptions,
    RaLMOptions,
    RaLMSpecOptions,
    RapidOptions,
    ReSpecOptions,
    SpeculativeRAGOptions,
    StandardRAGOptions,
)
from specrag.serving.plans import Ask, Plan, decoder, plan_text
from specrag.serving.schemas import Body


@dataclass(frozen=True, slots=True)
class ServedMethod:
    """An entry of the table.

    Attributes:
        title: for people.
        needs_kb: it cannot answer without a knowledge base.
        options: what ``specrag.options`` may hold.
        plan: checks an ask and makes its plan.
        needs_datastore: nor without a datastore.
    """

    title: str
    needs_kb: bool
    options: type[Body]
    plan: Callable[[Ask, Any], Plan]
    needs_datastore: bool = False


def _decoded(name: str) -> Callable[[Ask, Body], Plan]:
    """A method that decodes tokens; with a knowledge base it decodes standard RAG's answer."""

    def plan(ask: Ask, options: Body) -> Plan:
        method = decoder(name, options, ask)
        return plan_text(ask, method) if ask.kb is None else passage_plans.plan_answer(ask, method)

    return plan


#: By the name that requests use.
SERVED: Mapping[str, ServedMethod] = {
    "plain": ServedMethod("Plain decoding", False, NoOptions, _decoded("plain")),
    "respec": ServedMethod(
        "ReSpec: copies from text, checked by the model", False, ReSpecOptions, _decoded("respec")
    ),
    "prompt-lookup": ServedMethod("Prompt lookup", False, NoOptions, _decoded("prompt-lookup")),
    "token-recycling": ServedMethod("Token recycling", False, NoOptions, _decoded("token-recycling")),
    "sam-decoding": ServedMethod("SAM decoding", False, NoOptions, _decoded("sam-decoding")),
    "knn-lm": ServedMethod(
        "kNN-LM: every token is weighed with its neighbours in a datastore",
        False,
        KnnOptions,
        plan_knn,
        needs_datastore=True,
    ),
    "rapid": ServedMethod(
        "RAPID: a drafter reads the relevant part of a long text",
        False,
        RapidOptions,
        passage_plans.plan_rapid,
    ),
    "standard-rag": ServedMethod(
        "Standard RAG: passages in the prompt", True, StandardRAGOptions, passage_plans.plan_standard_rag
    ),
    "iterative-ralm": ServedMethod(
        "A passage every few tokens", True, RaLMOptions, passage_plans.plan_iterative
    ),
    "ralmspec": ServedMethod(
        "RaLMSpec: guesses the passage of every few tokens",
        True,
        RaLMSpecOptions,
        passage_plans.plan_ralmspec,
    ),
    "speculative-rag": ServedMethod(
        "Speculative RAG: drafts from subsets, the best one chosen",
        True,
        SpeculativeRAGOptions,
        passage_plans.plan_speculative_rag,
    ),
}


def served_method(name: str, field: str = "specrag.method") -> ServedMethod:
    """The method of a name.

    Args:
        field: what an error names.

    Raises:
        InputError: there is none.
    """
    check_method(name, field, SERVED)
    return SERVED[name]


def make_plan(ask: Ask, name: str) -> Plan:
    """Check a text that is asked for, by a method's name.

    Raises:
        InputError: the method does not exist, needs a knowledge base, or an option cannot be used.
        ContextLengthError: the prompt does not fit.
    """
    method = served_method(name)
    if method.needs_kb and ask.kb is None:
        raise InputError("specrag.kb", None, f"name a knowledge base; {name} answers from one")
    try:
        options = method.options(**ask.wish.options)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(["specrag.options", *(str(part)[:40] for part in problem["loc"])])
        known = ", ".join(method.options.model_fields) or "none"
        raise InputError(place, problem["type"], f"{problem['msg']}; {name} takes {known}") from None
    return method.plan(ask, options)


@dataclass(frozen=True, slots=True)
class Lent:
    """What a server lends a client, by name.

    Attributes:
        datastores: to be searched; without any the methods that need one are left out of the table.
        corpora: to be copied from.
        drafters: for ReSpec to ask, besides its own.
    """

    datastores: Sequence[str] = ()
    corpora: Sequence[str] = ()
    drafters: Sequence[str] = ()


def describe_methods(lent: Lent) -> list[dict[str, Any]]:
    """The table for clients."""
    return [
        {
            "name": name,
            "title": method.title,
            "needs_kb": method.needs_kb,
            "options": _describe_options(method.options, lent),
        }
        for name, method in SERVED.items()
        if lent.datastores or not method.needs_datastore
    ]


def _describe_options(options: type[Body], lent: Lent) -> dict[str, dict[str, Any]]:
    described = {}
    for name, schema in options.model_json_schema()["properties"].items() if options.model_fields else ():
        # Of alternatives the first tells the type; the others are values by name.
        first, *others = schema.get("anyOf", [schema])
        named = [value for other in others for value in other.get("enum", [other.get("const")])]
        choices = first.get("enum") or [value for value in named if value is not None] or None
        described[name] = {
            "type": "choice" if "enum" in first else first.get("type"),
            "default": schema.get("default"),
            "min": first.get("minimum"),
            "max": first.get("maximum"),
            "choices": choices,
            "help": schema.get("description", ""),
        }
    if "datastore" in described:
        stores = list(lent.datastores)
        described["datastore"] |= {"type": "choice", "choices": stores, "default": stores[0]}
    if options is ReSpecOptions:
        described["drafter"] |= {"type": "choice", "choices": [*DRAFTERS, *lent.drafters]}
        described["corpus"] |= {
            "type": "choice",
            "choices": {"": "none", **{name: name for name in lent.corpora}},
            "default": "",
        }
        if not lent.corpora:
            del described["corpus"]
    return described
