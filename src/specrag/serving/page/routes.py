"""Serves the page at ``/`` and the reference at ``/docs``: static files, read once at startup."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class _File:
    """One file of the page.

    Attributes:
        content: its bytes.
        media_type: for the Content-Type header.
        etag: changes with the content.
    """

    content: bytes
    media_type: str
    etag: str


def page_routes() -> list[Route]:
    """Routes of the pages: ``/``, ``/docs``, and ``/page/NAME`` for each of their files.

    Only files that were in the folder at startup are served, so no path can lead out of it. None of these files is
    secret: they are served without a key, and the page asks for one if the server requires it.
    """
    files = {path.name: _read(path) for path in sorted(FOLDER.iterdir()) if path.suffix in _TYPES}

    async def index(request: Request) -> Response:
        return _send(request, files["index.html"])

    async def reference(request: Request) -> Response:
        return _send(request, files["reference.html"])

    async def part(request: Request) -> Response:
        file = files.get(request.path_params["name"])
        return Response("Not found", 404, media_type="text/plain") if file is None else _send(request, file)

    return [
        Route("/", index, methods=["GET"], name="page", include_in_schema=False),
        Route("/docs", reference, methods=["GET"], name="reference", include_in_schema=False),
        Route("/page/{name}", part, methods=["GET"], name="page-part", include_in_schema=False),
    ]


def _read(path: Path) -> _File:
    content = path.read_bytes()
    return _File(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def _send(request: Request, file: _File) -> Response:
    # The browser revalidates every file every time, so that modules of different versions never mix. An unchanged
    # file costs one small response.
    headers = {"ETag": file.etag, "Cache-Control": "no-cache"}
    wanted = [tag.strip().removeprefix("W/") for tag in request.headers.get("If-None-Match", "").split(",")]
    if file.etag in wanted:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
