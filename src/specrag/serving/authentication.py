"""Whose request it is: every route but the page's files and the two about health asks for a key."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specrag.serving.keys import KeyRing
from specrag.serving.problems import ApiError, error_response

_OPEN = frozenset({"/", "/healthz", "/readyz"})
_OPEN_FOLDER = "/page/"


class Authentication:
    """Puts the key that a request carries into ``request.state.key``, or answers 401.

    Args:
        app: what answers.
        keys: those that are known.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and not _is_open(scope["path"]):
            key = self._keys.find(Headers(scope=scope).get("authorization"))
            if key is None:
                await error_response(_refusal())(scope, receive, send)
                return
            scope.setdefault("state", {})["key"] = key
        await self._app(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in _OPEN or path.startswith(_OPEN_FOLDER)


def _refusal() -> ApiError:
    return ApiError(
        401,
        "give a valid API key in the header Authorization: Bearer KEY",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
