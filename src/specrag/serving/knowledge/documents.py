"""``/v1/kb/NAME/documents`` and ``/v1/kb/jobs``: add and delete a knowledge base's documents, and follow the jobs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import anyio
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from specrag.errors import InputError
from specrag.request import file_name
from specrag.serving.errors import ApiError
from specrag.serving.keys import ApiKey
from specrag.serving.knowledge.places import check_document
from specrag.serving.knowledge.routes import (
    NewKnowledgeBase,
    check_new,
    check_readable,
    check_room,
    check_writable,
    make_base,
    operation_of,
)
from specrag.serving.knowledge.staging import Job
from specrag.serving.knowledge.uploads import disk_error, receive_files
from specrag.serving.operation.limits import JsonRoute

if TYPE_CHECKING:
    from specrag.serving.operation.setup import Operation

router = APIRouter(prefix="/v1/kb", route_class=JsonRoute, tags=["knowledge bases"])


@router.get("/jobs/{job}", summary="How far an upload or a deletion is")
def show_job(request: Request, job: str) -> dict[str, Any]:
    """Status, stage, how much of it is done, and in the end what was changed or why it failed."""
    return _describe_job(_find_job(request, job))


@router.delete("/jobs/{job}", status_code=202, summary="Cancel an upload or a deletion")
def cancel_job(request: Request, job: str) -> dict[str, Any]:
    """One that runs ends within a second, one that waits when its turn comes; one that has ended is answered 409."""
    found = _find_job(request, job)
    operation = check_writable(request, found.kb)
    try:
        cancelled = operation.jobs.cancel(found)
    except OSError as error:
        raise disk_error(error) from error
    if not cancelled:
        raise ApiError(409, "the job has ended", code="job_ended")
    return _describe_job(found)


def _find_job(request: Request, identifier: str) -> Job:
    key: ApiKey = request.state.key
    found = operation_of(request).jobs.find(identifier)
    if found is None or not key.may_read(found.kb):
        raise ApiError(404, "there is no job of this id", code="job_not_found")
    return found


@router.get("/{name}/documents", summary="List the documents of a knowledge base")
def list_documents(request: Request, name: str, after: str = "", limit: int = 100) -> dict[str, Any]:
    """Sorted by name; ``after`` is the last one of the page before."""
    operation = check_readable(request, name)
    if not 1 <= limit <= 1000:
        raise InputError("limit", limit, "give 1 to 1000")
    if operation.bases.kind(name) == "table":
        raise ApiError(400, "the documents of a table are not listed", code="not_supported", param="kb")
    uploaded = set()
    if operation.settings.kb_root is not None:
        documents = operation.bases.place(name).documents
        uploaded = {path.name for path in documents.glob("*")}
    held = [(file, passages) for file, passages in operation.bases.documents(name) if file.source > after]
    data = [
        {
            "id": file_name(file.source),
            "object": "kb.document",
            "bytes": file.size,
            "passages": passages,
            "uploaded": file.source in uploaded,
        }
        for file, passages in held[:limit]
    ]
    return {"object": "list", "kb": name, "data": data, "has_more": len(held) > limit}


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
    check = check_new if create else check_writable
    operation = await anyio.to_thread.run_sync(check, request, name)
    check_room(operation)
    identifier = operation.jobs.new_id()
    settings = operation.settings
    place = operation.bases.place(name)
    try:
        files = await receive_files(
            request, place.incoming / identifier, settings.max_upload_files, settings.max_upload_bytes
        )
    finally:
        for folder in (place.incoming, place.folder) if create else ():
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()
    job = Job(identifier, name, request.state.key.name, "add", files, makes_kb=create)
    return await anyio.to_thread.run_sync(_promise, operation, job)


@router.delete("/{name}/documents/{document}", status_code=202, summary="Delete an uploaded document")
def delete_document(request: Request, name: str, document: str) -> JSONResponse:
    """A job takes its passages out; documents that were not uploaded are their owner's to delete."""
    operation = check_writable(request, name)
    try:
        known = (operation.bases.place(name).documents / check_document(document)).is_file()
    except InputError:
        known = False
    if not known:
        raise ApiError(404, "no uploaded document has this name", code="document_not_found", param="document")
    check_room(operation)
    job = Job(operation.jobs.new_id(), name, request.state.key.name, "remove", (document,))
    return _promise(operation, job)


def _promise(operation: Operation, job: Job) -> JSONResponse:
    try:
        if job.makes_kb:
            make_base(operation, NewKnowledgeBase(name=job.kb))
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
