"""Lists what is served: ``GET /v1/models``, ``GET /v1/specrag/methods``, and method options in the OpenAPI schema.

The methods are described from their classes and options; nothing here knows a particular method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
from fastapi import APIRouter, Request

from specrag.errors import SpecragError
from specrag.methods import (
    DEFAULT_METHOD,
    Method,
    Needs,
    decoder_names,
    describe_options,
    method_class,
    method_names,
)
from specrag.serving.errors import unknown_model

if TYPE_CHECKING:
    from specrag.serving.service import Service

router = APIRouter(tags=["listings"])


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The model that writes, alone and over each knowledge base (``MODEL@KB``), the encoder, and the reranker."""
    service: Service = request.app.state.service
    return {"object": "list", "data": [_model(service, name) for name in await _names(request)]}


@router.get("/v1/models/{model:path}")
async def show_model(model: str, request: Request) -> dict[str, Any]:
    """One of them."""
    service: Service = request.app.state.service
    names = await _names(request)
    if model not in names:
        raise unknown_model(model, names)
    return _model(service, model)


@router.get("/v1/specrag/methods")
async def list_methods(request: Request) -> list[dict[str, Any]]:
    """The methods that ``specrag.method`` may name, with their options."""
    service: Service = request.app.state.service
    return describe_methods(service.names(request.state.key.may_read), service.settings.method)


async def _names(request: Request) -> list[str]:
    service: Service = request.app.state.service
    ids = await anyio.to_thread.run_sync(service.model_ids, request.state.key.may_read)
    return [*ids, *_kinds(service)]


def _kinds(service: Service) -> dict[str, str]:
    """The kind of each model that writes no text, by name."""
    settings = service.settings
    return {settings.encoder: "embedding"} | ({settings.reranker: "rerank"} if settings.reranker else {})


def _model(service: Service, name: str) -> dict[str, Any]:
    kind = _kinds(service).get(name)
    writes = kind is None
    described: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "specrag",
        "specrag": {"kind": kind or "generation", "ready": service.state == "ready"},
    }
    kb = "" if name in service.model_names else name.rpartition("@")[2]
    if writes and kb:
        described["specrag"]["kb"] = kb
    if writes and service.state == "ready":
        described["max_model_len"] = service.served(name).generator.context_length
    return described


_COMPONENTS = "#/components/schemas/"

#: Fields of an option that the list shows.
_SHOWN = ("type", "default", "min", "max", "choices", "help", "symbol")


@dataclass(frozen=True, slots=True)
class Names:
    """The names that options may use on this server.

    Attributes:
        datastores: kNN-LM datastores; methods that need one are left out if there is none.
        corpora: corpora that guesses may be copied from.
        drafters: models (``model:NAME``) and heads (``eagle:NAME``) that may draft tokens.
        rerankers: cross-encoders that may reorder passages.
        sessions: whether there is a model on this machine; methods that decode with one are left out if not.
        small_model: whether there is a smaller one, too; the cascade is left out if not.
    """

    datastores: Sequence[str] = ()
    corpora: Sequence[str] = ()
    drafters: Sequence[str] = ()
    rerankers: Sequence[str] = ()
    sessions: bool = True
    small_model: bool = True

    def of(self, option: Mapping[str, Any]) -> list[str]:
        """The names that an option takes; none for resources that only the server chooses, such as folders.

        Args:
            option: its description or its schema.
        """
        found: dict[str, Sequence[str]] = {
            "datastores": self.datastores,
            "corpora": self.corpora,
            "drafters": self.drafters,
            "decoders": decoder_names() if self.sessions else (),
        }
        usable = found.get(option["resource"], ())
        return [name for name in usable if name.startswith(option.get("prefix") or "")]


def default_method(name: str, has_kb: bool) -> str:
    """The method for a request that names none.

    Args:
        name: the server's default method.
    """
    return name if has_kb or Needs.RETRIEVER not in method_class(name).needs else DEFAULT_METHOD


# -- the table --------------------------------------------------------------------------------------------------


def describe_methods(names: Names, default: str) -> list[dict[str, Any]]:
    """The methods whose needs are met, with the options that a client may give.

    Args:
        default: the server's default method.
    """
    return [_describe(method, names, default) for method in _served(names)]


def _served(names: Names) -> list[type[Method]]:
    served = []
    for name in method_names():
        with suppress(SpecragError):  # a method of another package that cannot be imported
            method = method_class(name)
            if _needs_met(method, names):
                served.append(method)
    return served


def _needs_met(method: type[Method], names: Names) -> bool:
    if Needs.SESSIONS in method.needs and not names.sessions:
        return False
    if Needs.DATASTORE in method.needs and not names.datastores:
        return False
    if Needs.SMALL_MODEL in method.needs and not names.small_model:
        return False
    if Needs.DRAFTER not in method.needs:
        return True
    options = describe_options(method.Options).values()
    return any(names.of(option) for option in options if option["resource"] == "drafters")


def _describe(method: type[Method], names: Names, default: str) -> dict[str, Any]:
    options = {}
    for name, option in describe_options(method.Options).items():
        if option["resource"] is None or _name_choices(option, names.of(option)):
            options[name] = {key: option[key] for key in _SHOWN}
    return {
        "name": method.name,
        "title": method.summary,
        "needs_kb": Needs.RETRIEVER in method.needs,
        "needs_context": Needs.CONTEXT in method.needs,
        "reads_history": method.reads_history,
        "default": method.name == default,
        "options": options,
    }


def _name_choices(option: dict[str, Any], names: Sequence[str]) -> bool:
    """Turn an option into a choice among names; returns whether there are any."""
    own = option["own"] or []
    if not own and not names:
        return False
    option |= {"type": "choice", "choices": [*own, *names]}
    if option["resource"] == "corpora":  # a corpus is optional
        option |= {"choices": {"": "none", **{name: name for name in names}}, "default": ""}
    elif option["resource"] == "datastores" and len(names) == 1:
        option["default"] = names[0]
    return True


# -- the OpenAPI schema -----------------------------------------------------------------------------------------


def add_options(schema: dict[str, Any], names: Names, default: str) -> None:
    """Add to an OpenAPI schema the options that ``specrag.options`` takes for each ``specrag.method``.

    Args:
        schema: the whole server's, with the component ``SpecragField``.
    """
    components = schema["components"]["schemas"]
    methods = {method.name: method for method in _served(names)}
    for name, method in methods.items():
        _add_component(components, name, method, names)
    field = components["SpecragField"]
    field["properties"]["rerank"] |= {"anyOf": [{"enum": list(names.rerankers)}, {"type": "null"}]}
    field["properties"]["method"] |= {"anyOf": [{"enum": list(methods)}, {"type": "null"}]}
    usual = dict.fromkeys([default, default_method(default, has_kb=False)])
    unnamed = {
        "title": "the server's method",
        "properties": {
            "method": {"type": "null"},
            "options": {"anyOf": [{"$ref": _COMPONENTS + _component(name)} for name in usual]},
        },
    }
    field["oneOf"] = [unnamed, *(_named(name) for name in methods)]


def _named(name: str) -> dict[str, Any]:
    options = {"$ref": _COMPONENTS + _component(name)}
    return {
        "title": name,
        "required": ["method"],
        "properties": {"method": {"const": name}, "options": options},
    }


def _add_component(components: dict[str, Any], name: str, method: type[Method], names: Names) -> None:
    described = method.Options.model_json_schema(ref_template=f"{_COMPONENTS}{name}.{{model}}")
    for part, inner in described.pop("$defs", {}).items():
        components[f"{name}.{part}"] = inner
    properties = described.get("properties", {})
    for option, place in list(properties.items()):
        resource = {key: place.pop(key) for key in ("resource", "own", "prefix") if key in place}
        if resource and not resource.get("own") and not names.of(resource):
            del properties[option]
    components[_component(name)] = {**described, "title": f"Options of {name}", "description": method.summary}


def _component(name: str) -> str:
    return f"{name}.Options"
