"""Who may do what with which knowledge base, before anything is done.

A knowledge base that a key may not read is answered as one that does not exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Request
from pydantic import Field

from specrag.serving.keys import ApiKey
from specrag.serving.places import is_name
from specrag.serving.problems import ApiError
from specrag.serving.schemas import Body
from specrag.serving.uploads import disk_error

if TYPE_CHECKING:
    from specrag.serving.operation import Operation


class NewKnowledgeBase(Body):
    """A knowledge base to make.

    Attributes:
        name: 1 to 64 of a-z, 0-9, ``-`` and ``_``.
        chunk_tokens: most tokens of a passage; by default 200.
        chunk_overlap: tokens that a passage repeats of the one before; by default 32.
    """

    name: Annotated[str, Field(max_length=64)]
    chunk_tokens: Annotated[int, Field(ge=16, le=8192)] | None = None
    chunk_overlap: Annotated[int, Field(ge=0, le=4096)] | None = None


def operation_of(request: Request) -> Operation:
    """What the server's operation is made of."""
    operation: Operation = request.app.state.operation
    return operation


def check_readable(request: Request, name: str) -> Operation:
    """Raises ApiError: there is none of this name for this key."""
    operation = operation_of(request)
    key: ApiKey = request.state.key
    if not is_name(name) or not key.may_read(name) or name not in operation.bases:
        raise ApiError(404, "there is no knowledge base of this name", code="kb_not_found", param="kb")
    return operation


def check_writable(request: Request, name: str) -> Operation:
    """Raises ApiError: the key may not read or change it, or it takes no uploads."""
    operation = check_readable(request, name)
    key: ApiKey = request.state.key
    if not key.may_upload(name):
        raise ApiError(403, "this key may not change this knowledge base", code="no_upload", param="kb")
    if operation.bases.kind(name) == "table" or operation.settings.kb_root is None:
        raise ApiError(403, "this knowledge base takes no uploads", code="read_only", param="kb")
    return operation


def check_room(operation: Operation) -> None:
    """Raises ApiError: too many jobs wait."""
    if operation.jobs.full:
        raise ApiError(
            429,
            "too many uploads wait to be indexed; try again later",
            code="jobs_full",
            headers={"Retry-After": "10"},
        )


def check_creating(request: Request) -> Operation:
    """Raises ApiError: the key may not make knowledge bases."""
    key: ApiKey = request.state.key
    if not key.create:
        raise ApiError(403, "this key may not make knowledge bases", code="no_create")
    return operation_of(request)


def check_new(request: Request, name: str) -> Operation:
    """Raises ApiError or InputError: the key may not make one, or the name is taken or cannot be one."""
    operation = check_creating(request)
    operation.bases.place(name)  # says what is wrong with the name
    if name in operation.bases:
        raise _exists()
    return operation


def create_base(operation: Operation, body: NewKnowledgeBase) -> None:
    """Raises ApiError: the name is taken, or the disk refuses."""
    try:
        operation.bases.create(body.name, body.chunk_tokens, body.chunk_overlap)
    except FileExistsError:
        raise _exists() from None
    except OSError as error:
        raise disk_error(error) from error


def _exists() -> ApiError:
    return ApiError(409, "there is a knowledge base of this name", code="kb_exists", param="name")
