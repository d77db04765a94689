"""``/v1/kb``: list, make, search and delete knowledge bases."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio
from fastapi import APIRouter, Request
from pydantic import Field

from specrag.engine.threads import compute_alone
from specrag.errors import InputError
from specrag.retrieval.passage import Hit
from specrag.serving import kb_access
from specrag.serving.bodies import JsonRoute
from specrag.serving.kb_access import (
    NewKnowledgeBase,
    check_creating,
    check_readable,
    check_writable,
    operation_of,
)
from specrag.serving.keys import ApiKey
from specrag.serving.knowledge import Base
from specrag.serving.places import Description, shown
from specrag.serving.problems import ApiError
from specrag.serving.schemas import Body
from specrag.serving.uploads import disk_error

if TYPE_CHECKING:
    pass

router = APIRouter(prefix="/v1/kb", route_class=JsonRoute, tags=["knowledge bases"])


class SearchBody(Body):
    """A search.

    Attributes:
        query: a question.
        k: how many passages.
        index: ``flat`` and ``hnsw`` compare meaning, ``bm25`` words, ``hybrid`` both; of a table its own.
        where: conditions on the passages' fields, such as ``{"year": {">=": 2000}, "source": "a.md"}``.
    """

    query: Annotated[str, Field(min_length=1, max_length=20_000)]
    k: Annotated[int, Field(ge=1, le=100)] = 5
    index: Literal["flat", "hnsw", "bm25", "hybrid"] | None = None
    where: (
        Annotated[dict[Annotated[str, Field(max_length=200)], Any], Field(max_length=16, fail_fast=True)]
        | None
    ) = None


# -- knowledge bases ------------------------------------------------------------------------------------------


@router.get("", summary="List knowledge bases")
def list_bases(request: Request) -> dict[str, Any]:
    """Those that the key may read."""
    operation = operation_of(request)
    key: ApiKey = request.state.key
    names = [name for name in operation.bases.names() if key.may_read(name)]
    return {"object": "list", "data": [_describe(operation.bases.describe(name), key) for name in names]}


@router.post("", status_code=201, summary="Make a knowledge base")
def create_base(request: Request, body: NewKnowledgeBase) -> dict[str, Any]:
    """It holds nothing until documents are uploaded."""
    operation = check_creating(request)
    kb_access.create_base(operation, body)
    return _describe(operation.bases.describe(body.name), request.state.key)


@router.get("/{name}", summary="One knowledge base")
def show_base(request: Request, name: str) -> dict[str, Any]:
    """Its size, its encoder, and whether documents can be uploaded."""
    operation = check_readable(request, name)
    return _describe(operation.bases.describe(name), request.state.key)


@router.delete("/{name}", status_code=204, summary="Delete a knowledge base and its documents")
def delete_base(request: Request, name: str) -> None:
    """Only one that was made through the API, by a key that may make some."""
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
    started = time.perf_counter()

    def work() -> list[Hit]:
        compute_alone()
        with operation.bases.lease(name) as base:
            return _search(base, body)

    try:
        with anyio.fail_after(operation.settings.search_seconds):
            hits = await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=operation.searches)
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
    }


def _search(base: Base, body: SearchBody) -> list[Hit]:
    return base.search([body.query], min(body.k, len(base)), index=body.index or "hybrid", where=body.where)[
        0
    ]


def _describe_hit(rank: int, hit: Hit) -> dict[str, Any]:
    passage = hit.passage
    return {
        "object": "kb.passage",
        "rank": rank,
        "id": passage.id,
        "score": hit.score,
        "title": passage.title,
        "place": passage.place,
        "source": shown(passage.source),
        "text": passage.text,
        "metadata": dict(passage.metadata),
    }
