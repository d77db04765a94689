"""Who may call: API keys, and what browsers may do for the pages of other sites.

A server without a key trusts everybody at this machine, and with them every web page that is open there. A page from
elsewhere could reach the server through a host name that its owner points to 127.0.0.1, or through a form. Both are
refused: the host name must be one of ours, and a request that a browser marks as another site's must come from a
listed origin.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specrag.serving.errors import ApiError, error_response
from specrag.serving.keys import KeyRing
from specrag.serving.settings import Settings

_OPEN = frozenset(
    {"/", "/docs", "/healthz", "/readyz"}
)  # the pages hold nothing; what they ask for needs a key
_OPEN_FOLDER = "/page/"


class Authentication:
    """Puts the key that a request carries into ``request.state.key``, or answers 401.

    Args:
        app: the wrapped application.
        keys: the known keys.
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


POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    ]
)

_ALWAYS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_HERE = ("localhost", "127.0.0.1", "[::1]")
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


class SecurityHeaders:
    """Adds security headers to every response.

    Args:
        app: the wrapped application.
        shared: whether pages of other origins may read responses (CORS is on).
    """

    def __init__(self, app: ASGIApp, shared: bool = False) -> None:
        self._app = app
        left_out = {"Cross-Origin-Resource-Policy"} if shared else set()
        self._headers = {name: value for name, value in _ALWAYS.items() if name not in left_out}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self._app(scope, receive, sending)


class SiteGuard:
    """Refuses requests that another site's page sends through a browser.

    Args:
        app: the wrapped application.
        settings: our hosts and the allowed origins.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._origins = frozenset(settings.cors_origins)
        self._hosts: frozenset[str] | None = frozenset(settings.allowed_hosts)
        if not settings.needs_key:
            self._hosts = frozenset({*settings.allowed_hosts, *_HERE, settings.host})
        elif not settings.allowed_hosts:
            self._hosts = None  # perhaps behind a proxy that the settings do not know

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http":
            error = self._refusal(scope["method"], Headers(scope=scope))
            if error is not None:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, method: str, headers: Headers) -> ApiError | None:
        host = headers.get("host", "")
        if self._hosts is not None and _host_name(host) not in self._hosts:
            return ApiError(
                421, "this server is not known by this name; see allowed_hosts", code="unknown_host"
            )
        origin = headers.get("origin")
        if method in _SAFE or origin in self._origins:
            return None
        if origin is not None and _origin_host(origin) != host.lower():
            return ApiError(403, "requests of other sites are refused; see cors_origins", code="cross_site")
        if origin is None and headers.get("sec-fetch-site", "none") in {"cross-site", "same-site"}:
            return ApiError(403, "requests of other sites are refused; see cors_origins", code="cross_site")
        return None


def _host_name(host: str) -> str:
    """A Host header without its port."""
    name, _, port = host.lower().rpartition(":")
    return name if name and port.isdigit() else host.lower()


def _origin_host(origin: str) -> str:
    """Host and port of an origin; empty for ``null`` and for a malformed one."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
