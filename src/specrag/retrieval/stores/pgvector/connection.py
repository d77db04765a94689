"""Pooled connections to PostgreSQL with deadlines and retries; passwords are never shown."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg
from pgvector.psycopg import register_vector
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import TupleRow
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from specrag.checks import check_number, check_whole
from specrag.errors import InputError, StoreUnavailable
from specrag.retrieval.manifest import KnowledgeBaseError

T = TypeVar("T")

URL_VARIABLE = "SPECRAG_PGVECTOR_URL"
"""Holds the database's URL where none is given."""

_FIRST_PAUSE = 0.05  # seconds; doubled before each further attempt
_DIAGNOSIS = 2  # seconds for finding out why there is no connection; the shortest that libpq takes
_BATCH = 512  # rows fetched at a time where there may be many

# Conditions that pass: a connection that failed, a server that starts, stops or is full, a lost race.
_TRANSIENT = ("08", "57P01", "57P02", "57P03", "53300", "40001", "40P01")
_TOO_LATE = "57014"  # the server's own statement timeout


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Time-outs, retries and pool size.

    Args:
        timeout: seconds for a request in all, retries included; then it fails.
        connect_timeout: seconds that a request waits for a connection.
        retries: further attempts where a connection broke; none begins after ``timeout``.
        connections: the most that are open at once; more requests wait for their turn.
    """

    timeout: float = 30.0
    connect_timeout: float = 5.0
    retries: int = 3
    connections: int = 4

    def __post_init__(self) -> None:
        for name in ("timeout", "connect_timeout"):
            remedy = "give a number of seconds above 0"
            check_number(name, getattr(self, name), above=0, remedy=remedy)
        for name, least in (("retries", 0), ("connections", 1)):
            check_whole(name, getattr(self, name), least)


def database_url(url: str | None) -> str:
    """The URL given, else that of the environment.

    Raises:
        InputError: there is none, or it cannot be read. The message does not show it: it may hold a password.
    """
    found = os.environ.get(URL_VARIABLE, "") if url is None else url
    remedy = "give postgresql://USER@HOST:PORT/DATABASE"
    if not found.strip():
        raise InputError("pgvector", None, f"{remedy}, or set {URL_VARIABLE}")
    try:
        words = conninfo_to_dict(found)
    except psycopg.Error:
        raise InputError("pgvector", "(not shown)", remedy) from None
    # A password with one of these characters ends too early, and the rest of it is taken for a place.
    port_is_number = set(str(words.get("port") or "")) <= set("0123456789,")
    if not port_is_number or "@" in f"{words.get('host')}{words.get('dbname')}":
        remedy = f"{remedy}, and write the characters @ : / ? # % of a password as %40 %3A %2F %3F %23 %25"
        raise InputError("pgvector", "(not shown)", remedy)
    return found


class _OutOfTime(Exception):  # noqa: N818 - never leaves this file
    """A request ran past its deadline while it waited for the server."""


class TimedConnection(psycopg.Connection[TupleRow]):
    """A connection whose waiting ends at a deadline even where the server hangs and the network is silent."""

    deadline: float = math.inf  # of time.monotonic()

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """Wait as psycopg does, which resumes the generator at least once each ``interval``."""
        return super().wait(self._bounded(gen), interval, timeout)

    def _bounded(self, waiting: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        try:
            wish = next(waiting)
            while True:
                ready = yield wish
                if not ready and time.monotonic() > self.deadline:
                    self.close()  # its state is unknown: nobody may use it again
                    raise _OutOfTime
                wish = waiting.send(ready)
        except StopIteration as end:
            return end.value


class Session:
    """One attempt of a request on one connection.

    Args:
        connection: used by nobody else meanwhile.
        deadline: of ``time.monotonic()``.
    """

    def __init__(self, connection: TimedConnection, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline

    def rows(
        self, query: sql.Composed, parameters: Mapping[str, Any], settings: Mapping[str, str]
    ) -> list[TupleRow]:
        """All rows of a query, in one round trip together with its transaction.

        Args:
            parameters: by name.
            settings: of the server, for this query only.
        """
        with self._connection.pipeline(), self._connection.transaction():
            self._configure(settings)
            cursor = self._connection.execute(query, parameters, binary=True)
        return cursor.fetchall()

    def each_batch(
        self,
        query: sql.Composed,
        parameters: Mapping[str, Any],
        settings: Mapping[str, str],
        take: Callable[[list[TupleRow]], None],
    ) -> None:
        """Pass the rows of a query to ``take`` in batches, so that memory stays bounded."""
        with self._connection.transaction():
            self._configure(settings)
            with self._connection.cursor("specrag", binary=True) as cursor:
                cursor.execute(query, parameters)
                while rows := cursor.fetchmany(_BATCH):
                    take(rows)

    def _configure(self, settings: Mapping[str, str]) -> None:
        left = max(1, math.ceil(1000 * (self._deadline - time.monotonic())))
        chosen = {"statement_timeout": str(left), **settings}
        calls = sql.SQL(", ").join(
            sql.SQL("set_config({}, {}, true)").format(*pair) for pair in chosen.items()
        )
        self._connection.execute(sql.SQL("SELECT {}").format(calls))


class Database:
    """A pool of connections to the database that holds a table.

    Args:
        url: as for libpq, a URL or ``key=value`` words; what it leaves out libpq takes from its environment
            variables and password file.
        table: for the messages.
        settings: time limits and retries.
    """

    def __init__(self, url: str, table: str, settings: ConnectionSettings) -> None:
        words = conninfo_to_dict(url)
        self.settings = settings
        host = words.get("host") or words.get("hostaddr") or os.environ.get("PGHOST") or "localhost"
        port = words.get("port") or os.environ.get("PGPORT") or "5432"
        self.place = f"table {table!r} at {host}:{port}"
        self._password = str(words.get("password") or "")
        self._url = url
        self._pool = ConnectionPool(
            url,
            connection_class=TimedConnection,
            kwargs=self._words(settings.connect_timeout),
            configure=self._prepare,
            min_size=0,
            max_size=settings.connections,
            open=False,
            name="specrag",
            timeout=settings.connect_timeout,
            reconnect_timeout=settings.connect_timeout,
        )

    @staticmethod
    def _words(connect_timeout: float) -> dict[str, Any]:
        return {
            "autocommit": True,  # each request opens its own transaction
            "prepare_threshold": None,  # poolers such as PgBouncer lose prepared statements
            "application_name": "specrag",
            "client_encoding": "UTF8",
            "connect_timeout": max(_DIAGNOSIS, math.ceil(connect_timeout)),
        }

    def _prepare(self, connection: TimedConnection) -> None:
        connection.deadline = time.monotonic() + self.settings.connect_timeout
        connection.read_only = True
        register_vector(connection)

    @contextmanager
    def connect(self) -> Iterator[TimedConnection]:
        """A connection of its own, with errors in words: for opening and loading, which no pool has to serve.

        Raises:
            StoreUnavailable: there is none to be had, or it breaks.
        """
        with (
            self.errors(),
            TimedConnection.connect(self._url, **self._words(self.settings.connect_timeout)) as connection,
        ):
            yield connection

    def open(self) -> None:
        """Open the pool."""
        self._pool.open()

    def close(self) -> None:
        """Close all connections."""
        self._pool.close()

    def run(self, request: Callable[[Session], T]) -> T:
        """Answer a request that only reads; a transient failure begins it anew on another connection.

        Raises:
            StoreUnavailable: there is no connection, or no answer in time, also after retries.
            KnowledgeBaseError: the table is gone.
        """
        deadline = time.monotonic() + self.settings.timeout
        with self.errors():
            for attempt in range(self.settings.retries):
                try:
                    return self._attempt(request, deadline)
                except psycopg.OperationalError as error:
                    pause = _FIRST_PAUSE * 2**attempt
                    if not _is_transient(error) or time.monotonic() + pause >= deadline:
                        raise
                    self._pool.drain()  # what broke one connection broke the others that wait in the pool
                    time.sleep(pause)
            return self._attempt(request, deadline)

    def _attempt(self, request: Callable[[Session], T], deadline: float) -> T:
        left = deadline - time.monotonic()
        if left <= 0:
            raise self._too_late()
        try:
            connection = self._pool.getconn(min(self.settings.connect_timeout, left))
        except PoolTimeout:
            raise self._no_connection() from None
        except PoolClosed:
            raise StoreUnavailable(f"pgvector: {self.place} has been closed: open it again") from None
        try:
            connection.deadline = deadline
            return request(Session(connection, deadline))
        finally:
            self._pool.putconn(connection)

    def _no_connection(self) -> StoreUnavailable:
        """Why the pool has no connection to give."""
        try:
            TimedConnection.connect(self._url, **self._words(_DIAGNOSIS)).close()
        except psycopg.Error as error:
            return self._unreachable(error)
        return StoreUnavailable(
            f"pgvector: all {self.settings.connections} connections to {self.place} were busy for "
            f"{self.settings.connect_timeout:g} seconds: allow more connections, or wait longer for one"
        )

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn errors of psycopg into one line with place and remedy."""
        try:
            yield
        except _OutOfTime:
            raise self._too_late() from None
        except psycopg.errors.UndefinedTable:
            raise KnowledgeBaseError(
                f"pgvector: {self.place} does not exist: load a knowledge base into it, or name another one"
            ) from None
        except psycopg.OperationalError as error:
            raise self._too_late() if error.sqlstate == _TOO_LATE else self._unreachable(error) from error
        except psycopg.Error as error:
            raise StoreUnavailable(
                f"pgvector: {self.place} cannot be used ({self._reason(error)}): ask whoever runs the database"
            ) from error

    def _too_late(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"pgvector: {self.place} did not answer within {self.settings.timeout:g} seconds: "
            "look what the database is busy with, or give it more time"
        )

    def _unreachable(self, error: psycopg.Error) -> StoreUnavailable:
        return StoreUnavailable(
            f"pgvector: {self.place} cannot be reached ({self._reason(error)}): "
            "make sure that PostgreSQL runs there and that the URL is right"
        )

    def _reason(self, error: psycopg.Error) -> str:
        text = " ".join(str(error).split())
        if self._password:
            text = text.replace(self._password, "***")
        return text if len(text) <= 200 else f"{text[:197]}..."


def _is_transient(error: psycopg.OperationalError) -> bool:
    """Whether another attempt may succeed; a connection that breaks has no code."""
    return error.sqlstate is None or error.sqlstate.startswith(_TRANSIENT)
