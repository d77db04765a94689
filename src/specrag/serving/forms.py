"""The form that a text must keep to: ``response_format`` as a logits processor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrag.errors import InputError
from specrag.serving.schemas import ResponseFormat

if TYPE_CHECKING:
    from specrag.engine.processors import LogitsProcessor
    from specrag.serving.service import Service


def form_processors(service: Service, form: ResponseFormat | None) -> list[LogitsProcessor]:
    """The processors of a request's ``response_format``.

    Raises:
        InputError: there is no schema, or one that cannot be followed.
    """
    if form is None or form.type == "text":
        return []
    if form.type == "json_object":
        return [service.grammars.json()]
    if form.json_schema is None:
        raise InputError("response_format.json_schema", None, "give a name and a schema")
    schema = form.json_schema.schema_
    return [service.grammars.json(schema if schema is not None else {"type": "object"})]
