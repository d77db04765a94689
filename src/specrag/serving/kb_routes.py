"""``/v1/kb``: list, make and search knowledge bases, add documents to them and delete documents.

A knowledge base that a key may not read is answered as one that does not exist.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse

from specrag.engine.threads import compute_alone
from specrag.errors import InputError
from specrag.retrieval.passage import Hit
from specrag.serving.job import Job
from specrag.serving.keys import ApiKey
from specrag.serving.knowledge import Base, Description
from specrag.serving.places import check_document, is_name, shown
from specrag.serving.problems import ApiError
from specrag.serving.uploads import disk_error, receive_files

if TYPE_CHECKING:
    from specrag.serving.operation import Operation

router = APIRouter(prefix="/v1/kb", tags=["knowledge bases"])


class NewKnowledgeBase(BaseModel):
    """A knowledge base to make.

    Attributes:
        name: 1 to 64 of a-z, 0-9, ``-`` and ``_``.
        chunk_tokens: most tokens of a passage; by default 200.
        chunk_overlap: tokens that a passage repeats of the one before; by default 32.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(max_length=64)]
    chunk_tokens: Annotated[int, Field(ge=16, le=8192)] | None = None
    chunk_overlap: Annotated[int, Field(ge=0, le=4096)] | None = None


class SearchBody(BaseModel):
    """A search.

    Attributes:
        query: a question.
        k: how many passages.
        index: ``flat`` and ``hnsw`` compare meaning, ``bm25`` words, ``hybrid`` both; of a table its own.
        where: conditions on the passages' fields, such as ``{"year": {">=": 2000}, "source": "a.md"}``.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    query: Annotated[str, Field(min_length=1, max_length=20_000)]
    k: Annotated[int, Field(ge=1, le=100)] = 5
    index: Literal["flat", "hnsw", "bm25", "hybrid"] | None = None
    where: Annotated[dict[Annotated[str, Field(max_length=200)], Any], Field(max_length=16)] | None = None


def _operation(request: Request) -> Operation:
    operation: Operation = request.app.state.operation
    return operation


def _check_readable(request: Request, name: str) -> Operation:
    operation = _operation(request)
    key: ApiKey = request.state.key
    if not is_name(name) or not key.may_read(name) or name not in operation.bases:
        raise ApiError(404, "there is no knowledge base of this name", code="kb_not_found", param="kb")
    return operation


def _check_writable(request: Request, name: str) -> Operation:
    operation = _check_readable(request, name)
    key: ApiKey = request.state.key
    if not key.may_upload(name):
        raise ApiError(403, "this key may not change this knowledge base", code="no_upload", param="kb")
    if operation.bases.kind(name) == "table" or operation.settings.kb_root is None:
        raise ApiError(403, "this knowledge base takes no uploads", code="read_only", param="kb")
    return operation


def _check_room(operation: Operation) -> None:
    if operation.jobs.full:
        raise ApiError(
            429,
            "too many uploads wait to be indexed; try again later",
            code="jobs_full",
            headers={"Retry-After": "10"},
        )


# -- knowledge bases ------------------------------------------------------------------------------------------


@router.get("", summary="List knowledge bases")
def list_bases(request: Request) -> dict[str, Any]:
    """Those that the key may read."""
    operation = _operation(request)
    key: ApiKey = request.state.key
    names = [name for name in operation.bases.names() if key.may_read(name)]
    return {"object": "list", "data": [_describe(operation.bases.describe(name), key) for name in names]}


@router.post("", status_code=201, summary="Make a knowledge base")
def create_base(request: Request, body: NewKnowledgeBase) -> dict[str, Any]:
    """It holds nothing until documents are uploaded."""
    operation = _check_creating(request)
    _create(operation, body)
    return _describe(operation.bases.describe(body.name), request.state.key)


def _check_creating(request: Request) -> Operation:
    key: ApiKey = request.state.key
    if not key.create:
        raise ApiError(403, "this key may not make knowledge bases", code="no_create")
    return _operation(request)


def _check_new(request: Request, name: str) -> Operation:
    operation = _check_creating(request)
    operation.bases.place(name)  # says what is wrong with the name
    if name in operation.bases:
        raise _exists()
    return operation


def _create(operation: Operation, body: NewKnowledgeBase) -> None:
    try:
        operation.bases.create(body.name, body.chunk_tokens, body.chunk_overlap)
    except FileExistsError:
        raise _exists() from None
    except OSError as error:
        raise disk_error(error) from error


def _exists() -> ApiError:
    return ApiError(409, "there is a knowledge base of this name", code="kb_exists", param="name")


@router.get("/jobs/{job}", summary="How far an upload or a deletion is")
def show_job(request: Request, job: str) -> dict[str, Any]:
    """Status, stage, how much of it is done, and in the end what was changed or why it failed."""
    key: ApiKey = request.state.key
    found = _operation(request).jobs.find(job)
    if found is None or not key.may_read(found.kb):
        raise ApiError(404, "there is no job of this id", code="job_not_found")
    return _describe_job(found)


@router.get("/{name}", summary="One knowledge base")
def show_base(request: Request, name: str) -> dict[str, Any]:
    """Its size, its encoder, and whether documents can be uploaded."""
    operation = _check_readable(request, name)
    return _describe(operation.bases.describe(name), request.state.key)


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
    operation = _check_readable(request, name)
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


# -- documents ------------------------------------------------------------------------------------------------


@router.get("/{name}/documents", summary="List the documents of a knowledge base")
def list_documents(request: Request, name: str, after: str = "", limit: int = 100) -> dict[str, Any]:
    """Sorted by name; ``after`` is the last one of the page before."""
    operation = _check_readable(request, name)
    if not 1 <= limit <= 1000:
        raise InputError("limit", limit, "give 1 to 1000")
    if operation.bases.kind(name) == "table":
        raise ApiError(400, "the documents of a table are not listed", code="not_supported", param="kb")
    uploaded = set()
    if operation.settings.kb_root is not None:
        documents = operation.bases.place(name).documents
        uploaded = {path.name for path in documents.glob("*")}
    files = [file for file in operation.bases.files(name) if file.source > after]
    data = [
        {
            "id": shown(file.source),
            "object": "kb.document",
            "bytes": file.size,
            "passages": file.last - file.first,
            "uploaded": file.source in uploaded,
        }
        for file in files[:limit]
    ]
    return {"object": "list", "kb": name, "data": data, "has_more": len(files) > limit}


_FILES = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["files"],
                    "properties": {
                        "files": {"type": "array", "items": {"type": "string", "format": "binary"}}
                    },
                }
            }
        },
    }
}


@router.post("/{name}/documents", status_code=202, summary="Upload documents", openapi_extra=_FILES)
async def upload(request: Request, name: str, create: bool = False) -> JSONResponse:
    """All files are taken or none. They are indexed by a job; one of a name that is there replaces it.

    With ``create`` the knowledge base is made too, and is gone again if the files are refused or the job fails.
    """
    check = _check_new if create else _check_writable
    operation = await anyio.to_thread.run_sync(check, request, name)
    _check_room(operation)
    identifier = operation.jobs.new_id()
    settings = operation.settings
    place = operation.bases.place(name)
    try:
        files = await receive_files(
            request, place.incoming / identifier, settings.max_upload_files, settings.max_upload_bytes
        )
    finally:
        for folder in (place.incoming, place.folder) if create else ():
            with contextlib.suppress(OSError):  # it holds something
                folder.rmdir()
    job = Job(identifier, name, request.state.key.name, "add", files, makes_kb=create)
    return await anyio.to_thread.run_sync(_promise, operation, job)


@router.delete("/{name}/documents/{document}", status_code=202, summary="Delete an uploaded document")
def delete_document(request: Request, name: str, document: str) -> JSONResponse:
    """A job takes its passages out; documents that were not uploaded are their owner's to delete."""
    operation = _check_writable(request, name)
    try:
        known = (operation.bases.place(name).documents / check_document(document)).is_file()
    except InputError:
        known = False
    if not known:
        raise ApiError(404, "no uploaded document has this name", code="document_not_found", param="document")
    _check_room(operation)
    job = Job(operation.jobs.new_id(), name, request.state.key.name, "remove", (document,))
    return _promise(operation, job)


def _promise(operation: Operation, job: Job) -> JSONResponse:
    try:
        if job.makes_kb:
            _create(operation, NewKnowledgeBase(name=job.kb))
        operation.jobs.add(job)
    except (ApiError, InputError):
        operation.jobs.discard(job)
        raise
    except OSError as error:
        operation.jobs.discard(job)
        raise disk_error(error) from error
    return JSONResponse({"job": job.id, **_describe_job(job)}, 202, {"Location": f"/v1/kb/jobs/{job.id}"})


def _describe_job(job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "object": "kb.job",
        "kb": job.kb,
        "action": job.action,
        "files": list(job.files),
        "status": job.status,
        "stage": job.stage,
        "done": job.done,
        "total": job.total,
        "error": None if job.error is None else {"message": job.error},
        "report": job.report,
        "created": int(job.created),
    }
