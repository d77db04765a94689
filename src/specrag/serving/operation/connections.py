"""HTTP/1.1 connections that cannot be held open without use.

uvicorn waits forever for the rest of a request's head, and for a client that does not read its answer. Here every
connection is checked each second. It ends if a head does not arrive in time, if an answer is not read, or if the rest
of a body is still arriving long after the answer. (Until then the rest is read and dropped: if the connection closed
at once, the system would throw away the answer that says what was wrong with the body.) At the limit of connections,
the one that has been idle longest makes room. If none is idle, one whose body is still arriving does, of the client
with the most such connections. A connection that is being answered never does.

A client may close its side after a request and still read (RFC 9112, section 9.6). This looks the same as a client
that has gone altogether. In that case its system refuses what is written, so an interim response (100) finds out.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from specrag.serving.settings import Settings

_PERIOD = 1.0
_FIRST_LOOK = 0.005  # seconds after the interim response; the delay doubles with each look
_CLOSED = 7  # TCP_CLOSE of Linux: the other side has refused what was sent
_DROP = struct.pack("ii", 1, 0)  # linger on close for zero seconds, which drops what is unsent


class Watch:
    """The connections of one server.

    Args:
        settings: the limits.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.connections: dict[WatchedProtocol, None] = {}  # in order of arrival
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: WatchedProtocol) -> None:
        """Add a new connection; without room, end the least wanted one or the new one itself."""
        crowd = self._crowd(connection)
        if crowd:
            leaving = _least_wanted(crowd) or connection
            leaving.end()
            self.connections.pop(leaving, None)
            if leaving is connection:
                return
        self.connections[connection] = None
        if self._timer is None:
            self._timer = connection.loop.call_later(_PERIOD, self._look)

    def _crowd(self, connection: WatchedProtocol) -> list[WatchedProtocol]:
        """The connections of which one must make room for a new one; empty while there is room."""
        most = self.settings.max_client_connections
        if most is not None:
            own = [other for other in self.connections if other.address == connection.address]
            if len(own) >= most:
                return own
        return list(self.connections) if len(self.connections) >= self.settings.max_connections else []

    def remove(self, connection: WatchedProtocol) -> None:
        """Forget a connection that has ended."""
        self.connections.pop(connection, None)
        if not self.connections and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        for connection in list(self.connections):
            connection.look(loop.time())
        self._timer = loop.call_later(_PERIOD, self._look) if self.connections else None


def _least_wanted(crowd: list[WatchedProtocol]) -> WatchedProtocol | None:
    idle = [other for other in crowd if not other.busy]
    if idle:
        return min(idle, key=lambda other: other.idle_since)
    arriving = [other for other in crowd if other.arriving]
    held = Counter(other.address for other in arriving)
    return min(arriving, key=lambda other: (-held[other.address], other.idle_since), default=None)


class WatchedProtocol(H11Protocol):
    """uvicorn's own protocol under a watch. A subclass sets the watch; see :func:`watched_protocol`."""

    watch: Watch

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.idle_since = self.loop.time()
        self._written_since = self.idle_since
        self._half_closed = False

    @property
    def busy(self) -> bool:
        """Whether a request has arrived that is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def arriving(self) -> bool:
        """Whether the body of a request is still arriving and no answer has begun."""
        return self.busy and self.cycle.more_body and not self.cycle.response_started

    @property
    def address(self) -> str:
        """The client's address; empty if it has none."""
        return self.client[0] if self.client else ""

    def end(self) -> None:
        """Close the connection at once; unsent data is dropped, by the system too."""
        if self.transport is not None:
            peer = self.transport.get_extra_info("socket")
            with contextlib.suppress(OSError):
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP)
            self.transport.abort()

    def look(self, now: float) -> None:
        """End the connection if it has been stalled or idle for too long."""
        settings = self.watch.settings
        if self.transport.get_write_buffer_size() == 0:
            self._written_since = now
        stalled = now - self._written_since > settings.write_seconds
        late = not self.busy and now - self.idle_since > settings.header_seconds
        if stalled or late:
            self.end()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self.watch.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self.watch.remove(self)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """End the connection as the server stops, without waiting for the rest of a body."""
        if self.arriving:
            self.end()
        else:
            super().shutdown()

    def handle_events(self) -> None:
        """Answer what has arrived. A request with two lengths may hide another one, so it ends the connection."""
        super().handle_events()
        if self.busy and {b"content-length", b"transfer-encoding"} <= {name for name, _ in self.headers}:
            self.headers.append((b"connection", b"close"))  # RFC 9112, section 6.1: whatever is answered

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; returns whether the connection stays open for an answer."""
        if not self.busy or self.cycle.more_body or not hasattr(socket, "TCP_INFO"):
            return False
        self._half_closed = True
        if not self.cycle.response_started and self.scope["http_version"] != "1.0":
            interim = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
            self.transport.write(self.conn.send(interim))
        self._look_for_client(_FIRST_LOOK)
        return True

    def _look_for_client(self, delay: float) -> None:
        if self.transport.is_closing():
            return
        peer = self.transport.get_extra_info("socket")
        if peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSED:
            self.transport.abort()
        else:
            self.loop.call_later(delay, self._look_for_client, min(2 * delay, _PERIOD))

    def on_response_complete(self) -> None:
        """An answer has been written; from now on the connection is idle, even if the body is still arriving."""
        self.idle_since = self.loop.time()
        super().on_response_complete()
        if self._half_closed and not self.busy:
            self.transport.close()


def watched_protocol(settings: Settings) -> type[WatchedProtocol]:
    """The protocol class to give to uvicorn as ``http``."""
    shared = Watch(settings)

    class Protocol(WatchedProtocol):
        watch = shared

    return Protocol
