"""Pooled connections to PostgreSQL with deadlines and retries; passwords are never shown."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from pgvector.psycopg import register_vector
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import TupleRow
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from specrag.errors import InputError, StoreUnavailable
from specrag.retrieval.stores.base import Limits, Words, keep_trying

T = TypeVar("T")

URL_VARIABLE = "SPECRAG_PGVECTOR_URL"
"""Holds the database's URL if none is given."""

_DIAGNOSIS = 2  # seconds for finding out why there is no connection; the shortest timeout that libpq accepts

# Transient conditions: a failed connection, a server that is starting, stopping or full, a lost race.
_TRANSIENT = ("08", "57P01", "57P02", "57P03", "53300", "40001", "40P01")
_TOO_LATE = "57014"  # the server's own statement timeout


def database_url(url: str | None) -> str:
    """The URL given, else that of the environment.

    Raises:
        InputError: there is none, or it cannot be parsed. The message does not show it, since it may hold a password.
    """
    found = os.environ.get(URL_VARIABLE, "") if url is None else url
    remedy = "give postgresql://USER@HOST:PORT/DATABASE"
    if not found.strip():
        raise InputError("pgvector", None, f"{remedy}, or set {URL_VARIABLE}")
    try:
        words = conninfo_to_dict(found)
    except psycopg.Error:
        raise InputError("pgvector", "(not shown)", remedy) from None
    # A password with one of these characters ends too early, and its rest is taken for a host, port or database.
    port_is_number = set(str(words.get("port") or "")) <= set("0123456789,")
    if not port_is_number or "@" in f"{words.get('host')}{words.get('dbname')}":
        remedy = f"{remedy}, and write the characters @ : / ? # % of a password as %40 %3A %2F %3F %23 %25"
        raise InputError("pgvector", "(not shown)", remedy)
    return found


class _OutOfTime(Exception):  # noqa: N818 - never leaves this file
    """A request ran past its deadline while it waited for the server."""


class TimedConnection(psycopg.Connection[TupleRow]):
    """A connection whose waiting ends at a deadline even if the server hangs and the network is silent."""

    deadline: float = math.inf  # of time.monotonic()

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """Wait as psycopg does, which resumes the generator at least once per ``interval``."""
        return super().wait(self._bounded(gen), interval, timeout)

    def _bounded(self, waiting: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        try:
            wanted = next(waiting)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > self.deadline:
                    self.close()  # its state is unknown, so it must not be used again
                    raise _OutOfTime
                wanted = waiting.send(ready)
        except StopIteration as end:
            return end.value


class Database:
    """A pool of connections to the database that holds a table.

    Args:
        url: as for libpq, a URL or ``key=value`` words; libpq takes missing values from its environment variables and
            password file.
        table: name of the table, for messages.
        limits: time limits and retries.
    """

    def __init__(self, url: str, table: str, limits: Limits) -> None:
        words = conninfo_to_dict(url)
        host = words.get("host") or words.get("hostaddr") or os.environ.get("PGHOST") or "localhost"
        port = words.get("port") or os.environ.get("PGPORT") or "5432"
        self.limits = limits
        self.words = Words(
            f"pgvector: table {table!r} at {host}:{port}", limits, (str(words.get("password") or ""),)
        )
        self._url = url
        self._pool = ConnectionPool(
            url,
            connection_class=TimedConnection,
            kwargs=self._options(limits.connect_timeout),
            configure=self._prepare,
            min_size=0,
            max_size=limits.connections,
            open=False,
            name="specrag",
            timeout=limits.connect_timeout,
            reconnect_timeout=limits.connect_timeout,
        )

    @staticmethod
    def _options(connect_timeout: float) -> dict[str, Any]:
        return {
            "autocommit": True,  # each request opens its own transaction
            "prepare_threshold": None,  # poolers such as PgBouncer lose prepared statements
            "application_name": "specrag",
            "client_encoding": "UTF8",
            "connect_timeout": max(_DIAGNOSIS, math.ceil(connect_timeout)),
        }

    def _prepare(self, connection: TimedConnection) -> None:
        connection.deadline = time.monotonic() + self.limits.connect_timeout
        connection.read_only = True
        register_vector(connection)

    @contextmanager
    def connect(self) -> Iterator[TimedConnection]:
        """A separate connection outside the pool, with readable errors, for opening and writing.

        Raises:
            StoreUnavailable: there is no connection, or it breaks.
        """
        with (
            self.errors(),
            TimedConnection.connect(self._url, **self._options(self.limits.connect_timeout)) as connection,
        ):
            yield connection

    def open(self) -> None:
        """Open the pool."""
        self._pool.open()

    def close(self) -> None:
        """Close all connections."""
        self._pool.close()

    def rows(
        self, query: sql.Composed, parameters: Mapping[str, Any], settings: Mapping[str, str]
    ) -> list[TupleRow]:
        """All rows of a read-only query, in one round trip that includes its transaction.

        After a transient failure it is retried on another connection.

        Args:
            query: the query.
            parameters: its parameters, by name.
            settings: server settings for this query only.

        Raises:
            StoreUnavailable: there is no connection, or no answer in time, even after retries.
            KnowledgeBaseError: the table is gone.
        """

        def ask(left: float) -> list[TupleRow]:
            with self._connection(left) as connection:
                chosen = {"statement_timeout": str(max(1, math.ceil(1000 * left))), **settings}
                calls = sql.SQL(", ").join(
                    sql.SQL("set_config({}, {}, true)").format(*pair) for pair in chosen.items()
                )
                with connection.pipeline(), connection.transaction():
                    connection.execute(sql.SQL("SELECT {}").format(calls))
                    cursor = connection.execute(query, parameters, binary=True)
                return cursor.fetchall()

        with self.errors():
            return keep_trying(self.limits, ask, self._is_transient)

    @contextmanager
    def _connection(self, left: float) -> Iterator[TimedConnection]:
        try:
            connection = self._pool.getconn(min(self.limits.connect_timeout, left))
        except PoolTimeout:
            raise self._no_connection() from None
        except PoolClosed:
            raise self.words.closed() from None
        try:
            connection.deadline = time.monotonic() + left
            yield connection
        finally:
            self._pool.putconn(connection)

    def _is_transient(self, error: Exception) -> bool:
        """Whether another attempt may succeed; a broken connection has no error code."""
        if not isinstance(error, psycopg.OperationalError):
            return False
        if error.sqlstate is not None and not error.sqlstate.startswith(_TRANSIENT):
            return False
        self._pool.drain()  # what broke one connection also broke the idle ones in the pool
        return True

    def _no_connection(self) -> StoreUnavailable:
        """The error that says why the pool has no connection to give."""
        try:
            TimedConnection.connect(self._url, **self._options(_DIAGNOSIS)).close()
        except psycopg.Error as error:
            return self._unreachable(error)
        return StoreUnavailable(
            f"{self.words.place}: all {self.limits.connections} connections were busy for "
            f"{self.limits.connect_timeout:g} seconds: allow more connections, or wait longer for one"
        )

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn errors of psycopg into one-line errors with place and remedy."""
        try:
            yield
        except _OutOfTime:
            raise self.words.too_late() from None
        except psycopg.errors.UndefinedTable:
            raise self.words.missing() from None
        except psycopg.OperationalError as error:
            if error.sqlstate == _TOO_LATE:
                raise self.words.too_late() from error
            raise self._unreachable(error) from error
        except psycopg.Error as error:
            raise self.words.unusable(error) from error

    def _unreachable(self, error: psycopg.Error) -> StoreUnavailable:
        # In these cases the server did answer, but libpq gives no error code.
        if "authentication failed" in str(error) or "does not exist" in str(error):
            return self.words.refused(error)
        return self.words.unreachable(error)
