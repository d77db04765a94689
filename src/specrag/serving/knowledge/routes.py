"""``/v1/kb``: list, make, search and delete knowledge bases, and check what a key may do with each.

A knowledge base that a key may not read is treated as one that does not exist.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio
from fastapi import APIRouter, Request
from pydantic import Field

from specrag.engine import use_one_thread
from specrag.errors import InputError
from specrag.methods import missing_since
from specrag.request import file_name
from specrag.retrieval import Hit
from specrag.serving.errors import ApiError
from specrag.serving.keys import ApiKey
from specrag.serving.knowledge.bases import Base
from specrag.serving.knowledge.places import Description, is_name
from specrag.serving.knowledge.uploads import disk_error
from specrag.serving.openai.schemas import Body, ConditionText
from specrag.serving.operation.limits import JsonRoute

if TYPE_CHECKING:
    from specrag.retrieval.encoder import Reranker
    from specrag.serving.operation.setup import Operation
    from specrag.serving.service import Service


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
    """The parts that routes and middleware share."""
    operation: Operation = request.app.state.operation
    return operation


def check_readable(request: Request, name: str) -> Operation:
    """Return the operation; raises ApiError if there is no knowledge base of this name for this key."""
    operation = operation_of(request)
    key: ApiKey = request.state.key
    if not is_name(name) or not key.may_read(name) or name not in operation.bases:
        raise ApiError(404, "there is no knowledge base of this name", code="kb_not_found", param="kb")
    return operation


def check_writable(request: Request, name: str) -> Operation:
    """Return the operation; raises ApiError if the key may not read or change it, or it takes no uploads."""
    operation = check_readable(request, name)
    key: ApiKey = request.state.key
    if not key.may_upload(name):
        raise ApiError(403, "this key may not change this knowledge base", code="no_upload", param="kb")
    if operation.bases.kind(name) == "table" or operation.settings.kb_root is None:
        raise ApiError(403, "this knowledge base takes no uploads", code="read_only", param="kb")
    return operation


def check_room(operation: Operation) -> None:
    """Raise ApiError if too many jobs are waiting."""
    if operation.jobs.full:
        raise ApiError(
            429,
            "too many uploads wait to be indexed; try again later",
            code="jobs_full",
            headers={"Retry-After": "10"},
        )


def check_creating(request: Request) -> Operation:
    """Return the operation; raises ApiError if the key may not make knowledge bases."""
    key: ApiKey = request.state.key
    if not key.create:
        raise ApiError(403, "this key may not make knowledge bases", code="no_create")
    return operation_of(request)


def check_new(request: Request, name: str) -> Operation:
    """Return the operation; raises ApiError or InputError if the key may not make one, or the name cannot be used."""
    operation = check_creating(request)
    operation.bases.place(name)  # says what is wrong with the name
    if name in operation.bases:
        raise _exists()
    return operation


def make_base(operation: Operation, body: NewKnowledgeBase) -> None:
    """Make a knowledge base; raises ApiError if the name is taken, or the disk refuses."""
    try:
        operation.bases.create(body.name, body.chunk_tokens, body.chunk_overlap)
    except FileExistsError:
        raise _exists() from None
    except OSError as error:
        raise disk_error(error) from error


def _exists() -> ApiError:
    return ApiError(409, "there is a knowledge base of this name", code="kb_exists", param="name")


router = APIRouter(prefix="/v1/kb", route_class=JsonRoute, tags=["knowledge bases"])


class SearchBody(Body):
    """A search.

    Attributes:
        query: a question.
        k: how many passages.
        index: ``flat`` and ``hnsw`` compare meaning, ``bm25`` words, ``hybrid`` both; of a table its own.
        where: conditions on the passages' fields, such as ``{"year": {">=": 2000}, "source": "a.md"}``, the text
            ``year >= 2000 and not source = a.md``, or a list of texts that must all hold.
        rerank: a cross-encoder of this server that orders the best ones anew.
    """

    query: Annotated[str, Field(min_length=1, max_length=20_000)]
    k: Annotated[int, Field(ge=1, le=100)] = 5
    index: Literal["flat", "hnsw", "bm25", "hybrid"] | None = None
    where: (
        Annotated[dict[Annotated[str, Field(max_length=200)], Any], Field(max_length=16, fail_fast=True)]
        | Annotated[str, Field(min_length=1, max_length=20_000)]
        | Annotated[list[ConditionText], Field(min_length=1, max_length=32, fail_fast=True)]
        | None
    ) = None
    rerank: Annotated[str, Field(max_length=128)] | None = None


# -- knowledge bases ------------------------------------------------------------------------------------------


@router.get("", summary="List knowledge bases")
def list_bases(request: Request) -> dict[str, Any]:
    """List the knowledge bases that the key may read."""
    operation = operation_of(request)
    key: ApiKey = request.state.key
    names = [name for name in operation.bases.names() if key.may_read(name)]
    return {"object": "list", "data": [_describe(operation.bases.describe(name), key) for name in names]}


@router.post("", status_code=201, summary="Make a knowledge base")
def create_base(request: Request, body: NewKnowledgeBase) -> dict[str, Any]:
    """Make a knowledge base, which holds nothing until documents are uploaded."""
    operation = check_creating(request)
    make_base(operation, body)
    return _describe(operation.bases.describe(body.name), request.state.key)


@router.get("/{name}", summary="One knowledge base")
def show_base(request: Request, name: str) -> dict[str, Any]:
    """Describe a knowledge base: its size, its encoder, and whether documents can be uploaded."""
    operation = check_readable(request, name)
    return _describe(operation.bases.describe(name), request.state.key)


@router.delete("/{name}", status_code=204, summary="Delete a knowledge base and its documents")
def delete_base(request: Request, name: str) -> None:
    """Delete a knowledge base that was made through the API; the key must be one that may make some."""
    operation = check_writable(request, name)
    if not request.state.key.create:
        raise ApiError(403, "this key may not delete knowledge bases", code="no_create")
    if operation.jobs.busy(name):
        raise ApiError(409, "its documents are being indexed; cancel the job, or wait", code="kb_busy")
    try:
        operation.bases.delete(name)
    except OSError as error:
        raise disk_error(error) from error


def _describe(base: Description, key: ApiKey) -> dict[str, Any]:
    return {
        "id": base.name,
        "object": "kb",
        "kind": base.kind,
        "documents": base.documents,
        "passages": base.passages,
        "generation": base.generation,
        "encoder": base.encoder,
        "writable": base.writable and key.may_upload(base.name),
        "problem": base.problem,
    }


# -- searching ------------------------------------------------------------------------------------------------


@router.post("/{name}/search", summary="Search a knowledge base")
async def search(request: Request, name: str, body: SearchBody) -> dict[str, Any]:
    """The best passages for a question, best first."""
    operation = check_readable(request, name)
    if "\0" in body.query:
        raise InputError("query", body.query, "it holds a NUL character")
    if operation.searches.statistics().tasks_waiting > operation.settings.max_queue:
        raise ApiError(
            429, "too many searches wait; try again later", code="queue_full", headers={"Retry-After": "2"}
        )
    service: Service = request.app.state.service
    started = time.perf_counter()
    began = time.monotonic()

    def work() -> tuple[list[Hit], tuple[str, ...]]:
        use_one_thread()
        with operation.bases.lease(name) as base:
            reranker = None if body.rerank is None else service.reranker(body.rerank)
            return _search(base, body, reranker), missing_since(base, began)

    try:
        with anyio.fail_after(operation.settings.search_seconds):
            hits, missing = await anyio.to_thread.run_sync(
                work, abandon_on_cancel=True, limiter=operation.searches
            )
    except TimeoutError:
        raise ApiError(504, "the search took too long", code="deadline_exceeded") from None
    seconds = time.perf_counter() - started
    operation.metrics.search(seconds, len(hits))
    operation.log.info("search", kb=name, query=body.query, hits=len(hits), seconds=round(seconds, 4))
    return {
        "object": "list",
        "kb": name,
        "data": [_describe_hit(rank, hit) for rank, hit in enumerate(hits, 1)],
        "seconds": round(seconds, 6),
        "missing_shards": list(missing),
    }


def _search(base: Base, body: SearchBody, reranker: Reranker | None) -> list[Hit]:
    k = min(body.k, len(base))
    index = body.index or "hybrid"
    (hits,) = base.search([body.query], k, index=index, where=body.where, reranker=reranker)
    return hits


def _describe_hit(rank: int, hit: Hit) -> dict[str, Any]:
    passage = hit.passage
    return {
        "object": "kb.passage",
        "rank": rank,
        "id": passage.id,
        "score": hit.score,
        "title": passage.title,
        "place": passage.place,
        "source": file_name(passage.source),
        "text": passage.text,
        "metadata": dict(passage.metadata),
    }
