"""Reports every failed request in the form that OpenAI's clients expect: ``{"error": {message, type, param, code}}``.

A message says what the caller can do; it never holds a stack trace, a path of this machine or another request's
text. An unexpected failure is answered with 500 and the request's id, under which the log has the details.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from specrag.checks import nearest
from specrag.errors import (
    Cancelled,
    ContextLengthError,
    DeadlineExceeded,
    InputError,
    SpecragError,
    StoreUnavailable,
    UpstreamError,
)

_LONGEST = 500  # characters of a message

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    411: "length_required",
    413: "request_too_large",
    415: "unsupported_media_type",
}


class ApiError(HTTPException):
    """An error that is sent as the response to a request.

    Args:
        status: the HTTP status.
        message: one sentence for the caller.
        code: a machine-readable error code.
        param: the request field at fault.
        headers: extra response headers, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.type = type
        self.code = code
        self.param = param


def error_body(
    status: int, message: str, *, code: str | None = None, param: str | None = None
) -> dict[str, dict[str, str | None]]:
    """The body of an error response, or of an error inside a stream."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    line = " ".join(message.split())
    shortened = line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."
    return {"error": {"message": shortened, "type": kind, "param": param, "code": code or _CODES.get(status)}}


def error_response(error: ApiError) -> Response:
    """The response to a request that failed."""
    body = error_body(error.status_code, str(error.detail), code=error.code, param=error.param)
    # ASCII, so that a lone surrogate from the request cannot make the error response fail too.
    return Response(
        json.dumps(body), error.status_code, dict(error.headers or {}), media_type="application/json"
    )


def to_api_error(error: BaseException) -> ApiError:
    """The error that the caller gets for a failure."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, RequestValidationError):
        return _invalid(error.errors())
    if isinstance(error, InputError):
        too_long = isinstance(error, ContextLengthError)
        code = "context_length_exceeded" if too_long else "invalid_value"
        return ApiError(400, str(error), code=code, param=error.field)
    if isinstance(error, ClientDisconnect):
        return ApiError(499, "the client has gone", code="cancelled")
    if isinstance(error, SpecragError):
        return _of_specrag(error)
    return ApiError(500, "an unexpected error; the log has it under this request's id", code="internal_error")


def _of_specrag(error: SpecragError) -> ApiError:
    if isinstance(error, DeadlineExceeded):
        return ApiError(504, str(error), code="deadline_exceeded")
    if isinstance(error, Cancelled):
        return ApiError(499, str(error), code="cancelled")
    if isinstance(error, StoreUnavailable):
        message = "the database of this knowledge base does not answer; try again later"
        return ApiError(503, message, code="store_unavailable", headers={"Retry-After": "5"})
    if isinstance(error, UpstreamError):
        pause = {} if error.retry_after is None else {"Retry-After": str(math.ceil(error.retry_after))}
        return ApiError(error.status, str(error), code="upstream_failed", headers=pause)
    # The message is meant for the operator and may name a folder of this machine.
    return ApiError(500, "the server could not do this; its log says why", code=type(error).__name__)


def _invalid(problems: Sequence[Any]) -> ApiError:
    """The first problem in a request's body; never repeats what the body holds."""
    problem = problems[0] if problems else {"loc": (), "msg": "the request is malformed", "type": ""}
    place = ".".join(str(part)[:80] for part in problem["loc"] if part != "body")
    if problem["type"] == "json_invalid":
        return ApiError(400, "the body is no JSON", code="invalid_json")
    message = str(problem["msg"]).removeprefix("Value error, ")
    return ApiError(
        400, f"{place}: {message}" if place else message, code="invalid_value", param=place or None
    )


def unknown_model(model: str, known: Iterable[str]) -> ApiError:
    """The error for a model that is not served to the caller.

    Args:
        known: ids of the models that are.
    """
    near = nearest(model, known)
    hint = f"did you mean {near!r}? " if near else ""
    message = f"the model {model[:80]!r} is not served here; {hint}GET /v1/models lists what is"
    return ApiError(404, message, code="model_not_found", param="model")


def add_error_handlers(app: FastAPI) -> None:
    """Answer every failure of a route in OpenAI's form."""

    def answer(_: Request, error: Exception) -> Response:
        return error_response(to_api_error(error))

    for kind in (HTTPException, RequestValidationError, InputError):
        app.add_exception_handler(kind, answer)
