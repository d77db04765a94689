"""The methods by name: ours, and those that other packages add through the entry-point group ``specrag.methods``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_args, get_origin

from pydantic import ValidationError

from specrag.checks import check_choice, did_you_mean
from specrag.errors import InputError
from specrag.extras import brought, load_brought

if TYPE_CHECKING:
    from specrag.methods.base import Method, MethodOptions

GROUP = "specrag.methods"

#: The only place that names our own methods; each is imported when it is requested.
_OWN: Mapping[str, str] = {
    "adaptive": "specrag.methods.adaptive:Adaptive",
    "plain": "specrag.methods.plain:Plain",
    "respec": "specrag.methods.respec:ReSpec",
    "prompt-lookup": "specrag.methods.baselines:PromptLookup",
    "token-recycling": "specrag.methods.baselines:TokenRecycling",
    "sam-decoding": "specrag.methods.baselines:SamDecoding",
    "draft-model": "specrag.methods.baselines:DraftModel",
    "eagle-2": "specrag.methods.baselines:Eagle2",
    "knn-lm": "specrag.methods.knn_lm:KnnLM",
    "standard-rag": "specrag.methods.standard_rag:StandardRAG",
    "cascade": "specrag.methods.standard_rag.cascade:Cascade",
    "long-context": "specrag.methods.rapid:LongContext",
    "rapid": "specrag.methods.rapid:RAPID",
    "naive-sd": "specrag.methods.rapid:NaiveSD",
    "streaming-drafter": "specrag.methods.rapid:StreamingDrafter",
    "sequential": "specrag.methods.ralmspec:Sequential",
    "ralmspec": "specrag.methods.ralmspec:RaLMSpec",
    "speculative-rag": "specrag.methods.speculative_rag:SpeculativeRAG",
}

#: The default method of decoding.
DEFAULT_METHOD = "adaptive"
#: The default methods over a knowledge base and from a long context; they decode with the default above.
DEFAULT_OVER_PASSAGES, DEFAULT_OVER_CONTEXT = "standard-rag", "long-context"


def own_names() -> tuple[str, ...]:
    """The methods that come with specrag."""
    return tuple(_OWN)


def method_names() -> tuple[str, ...]:
    """All methods, ours first."""
    return (*_OWN, *sorted(brought(GROUP).keys() - _OWN))


def method_class(name: str, field: str = "method") -> type[Method]:
    """The class of a named method.

    Args:
        field: what an error names.

    Raises:
        InputError: there is none.
        SpecragError: it comes from another package that cannot be imported.
    """
    check_choice(field, name, method_names())
    if name in _OWN:
        module, _, attribute = _OWN[name].partition(":")
        made: type[Method] = getattr(import_module(module), attribute)
        return made
    found: type[Method] = load_brought(brought(GROUP)[name], "method")
    return found


def make_method(
    name: str, values: Mapping[str, Any] | None = None, *, field: str = "method", place: str = "options"
) -> Method:
    """A method with its options.

    Args:
        values: options by name, as in JSON.
        field, place: what an error names, for the method and for an option.

    Raises:
        InputError: there is no such method or option, or a value is out of bounds.
    """
    made = method_class(name, field)
    return made(check_values(made.Options, values or {}, name, place))


def check_values(
    options: type[MethodOptions],
    values: Mapping[str, Any],
    owner: str,
    place: str = "options",
    *,
    texts: bool = False,
) -> MethodOptions:
    """Options from values.

    Args:
        owner: the method they belong to, for the error.
        texts: values are texts to be parsed; ``none`` means no value.

    Raises:
        InputError: one is unknown or out of bounds.
    """
    known = options.model_fields
    for given in values:
        if given not in known:
            listed = f"{did_you_mean(given, known)}{owner} takes {', '.join(known) or 'none'}"
            raise InputError(_join(place, given), values[given], listed)
    try:
        if texts:
            written = {
                key: value for key, value in values.items() if str(value).lower() not in ("none", "null")
            }
            return options.model_validate(written, strict=False)
        return options.model_validate(
            {key: _as_declared(options, key, value) for key, value in values.items()}
        )
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        path = [str(part)[:40] for part in problem["loc"]]
        # The parts after the field's name are the alternatives of its type.
        where = path[0] if path else ""
        value = values.get(where, problem["input"])
        remedy = remedy_of(options, where) if where in known else problem["msg"]
        raise InputError(_join(place, where), value, remedy) from None


def _as_declared(options: type[MethodOptions], name: str, value: Any) -> Any:
    """A tuple for a list, if the option is a tuple: JSON has no tuples."""
    kind = options.model_fields[name].annotation
    is_tuple = tuple in {get_origin(kind), *(get_origin(each) for each in get_args(kind))}
    return tuple(value) if is_tuple and isinstance(value, list) else value


def remedy_of(options: type[MethodOptions], name: str) -> str:
    """What may be given for an option, such as ``give a whole number from 1 to 32``."""
    schema = options.model_json_schema()
    return f"give {value_kinds(schema['properties'][name], schema)}"


def value_kinds(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """The values that a field takes, in words.

    Args:
        schema: of the field.
        root: of all fields, for references.
    """
    kinds = [_kind(kind, root) for kind in alternatives(schema)]
    return " or ".join(kind for kind in kinds if kind)


def alternatives(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schemas that a field's values may have."""
    return list(schema.get("anyOf", [schema]))


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, looked up if it is a reference."""
    if "$ref" not in schema:
        return schema
    found: Mapping[str, Any] = root["$defs"][schema["$ref"].rpartition("/")[2]]
    return found


def _kind(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    schema = resolved(schema, root)
    if "enum" in schema:
        return "one of " + ", ".join(str(value) for value in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        return f"several: {_kind(schema.get('items', {}), root) or 'texts'}"
    kind = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "a text"}
    text = kind.get(schema.get("type", ""), "")
    low, high = schema.get("minimum"), schema.get("maximum")
    above = schema.get("exclusiveMinimum")
    below = schema.get("exclusiveMaximum")
    if low is not None:
        text += f" from {low:,}"
    elif above is not None:
        text += f" above {above:,}"
    if high is not None:
        text += f" to {high:,}" if low is not None else f" up to {high:,}"
    elif below is not None:
        text += f" and below {below:,}"
    return text


def _join(place: str, name: str) -> str:
    separator = " " if place.startswith("-") else "."
    return f"{place}{separator}{name}" if place and name else place or name
