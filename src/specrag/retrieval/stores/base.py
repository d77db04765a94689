"""The protocol of stores: external databases that keep passages with their vectors.

A store only returns candidates; it does not rank. :class:`~specrag.retrieval.stores.retriever.StoreRetriever` scores
them with our kernel, asks for more if the store's own rounding might have hidden one, and checks conditions again, so
that every store gives the same passages with bit for bit the same scores.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

import numpy as np

from specrag.checks import check_number, check_whole
from specrag.errors import InputError, SpecragError, StoreUnavailable
from specrag.retrieval.index.scoring import LONGEST, Floats, Longs, largest_norm
from specrag.retrieval.manifest import EncoderRecord, KnowledgeBaseError
from specrag.retrieval.passage import Passage
from specrag.retrieval.passage_store import flatten
from specrag.retrieval.progress import Progress, Reporter

if TYPE_CHECKING:
    from specrag.retrieval.index.filters import Filter, Scalar
    from specrag.retrieval.knowledge_base import KnowledgeBase

T = TypeVar("T")

FORMAT = 1
"""The version of a store's content: the passages' fields and the record of the store."""

BATCH = 256
"""Passages written at a time."""

FIRST_PAUSE = 0.05
"""Seconds before a request is sent again; doubled before each further attempt."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a store may take, and how often a request is retried.

    Args:
        timeout: seconds for a whole request, including retries; then it fails.
        connect_timeout: seconds that a request waits for a connection.
        retries: further attempts after a connection broke; none begins after ``timeout``.
        connections: the most connections open at once; more requests wait for their turn.
    """

    timeout: float = 30.0
    connect_timeout: float = 5.0
    retries: int = 3
    connections: int = 4

    def __post_init__(self) -> None:
        for name in ("timeout", "connect_timeout"):
            check_number(name, getattr(self, name), above=0, remedy="give a number of seconds above 0")
        for name, least in (("retries", 0), ("connections", 1)):
            check_whole(name, getattr(self, name), least)


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """What a search must know about a store.

    Attributes:
        passages: number of passages.
        encoder: the encoder that made the vectors.
        longest: upper bound of the vectors' Euclidean lengths, which bounds the store's rounding error.
        fields: fields that conditions can name.
        breadth: candidates of an approximate search; ``None`` if there is no approximate index.
        lists: those fields that hold a list in some passage.
        complete: whether loading has finished.
    """

    passages: int
    encoder: EncoderRecord
    longest: float = 0.0
    fields: tuple[str, ...] = ("place", "source", "title")
    breadth: int | None = None
    lists: tuple[str, ...] = ()
    complete: bool = True

    def with_passages(self, passages: Sequence[Passage], vectors: Floats) -> StoreInfo:
        """The record after these passages have been added, except for their number, which the store itself counts.

        Raises:
            InputError: a vector is not finite, or has another dimension.
        """
        check_vectors(vectors, self.encoder.dimension)
        fields = {*self.fields, *(name for passage in passages for name in flatten(passage.metadata))}
        lists = {*self.lists, *(name for passage in passages for name in _lists(passage.metadata))}
        longest = max(self.longest, float(largest_norm(np.ascontiguousarray(vectors))))
        return replace(self, longest=longest, fields=tuple(sorted(fields)), lists=tuple(sorted(lists)))

    def to_json(self) -> str:
        """Serialise."""
        return json.dumps({"format": FORMAT, **asdict(self)}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: object, place: str, passages: int | None = None) -> StoreInfo:
        """Read what :meth:`to_json` wrote.

        Args:
            text: the JSON.
            place: what errors call the store.
            passages: number of passages, if the database has counted them.

        Raises:
            KnowledgeBaseError: there is nothing, another version of specrag wrote it, or it is damaged.
        """
        if not text:
            raise KnowledgeBaseError(f"{place} was not made by specrag: name another one")
        try:
            content = json.loads(str(text))
            if content.get("format") != FORMAT:
                raise KnowledgeBaseError(
                    f"{place} has format {content.get('format')!r} and this version of specrag reads format "
                    f"{FORMAT}: load the knowledge base again"
                )
            graph = content.get("hnsw") or {}  # written by earlier versions of specrag
            return cls(
                passages=int(content["passages"]) if passages is None else passages,
                encoder=EncoderRecord(**content["encoder"]),
                longest=float(content["longest"]),
                fields=tuple(content["fields"]),
                breadth=content.get("breadth", graph.get("ef_search")),
                lists=tuple(content.get("lists", ())),
                complete=content.get("complete", True),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise KnowledgeBaseError(
                f"the record of {place} is damaged: load the knowledge base again"
            ) from error


def _lists(metadata: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The fields whose value is a list, named as by :func:`flatten`."""
    for name, value in metadata.items():
        if isinstance(value, Mapping):
            yield from _lists(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield f"{prefix}{name}"


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """A passage with its vector, float32 [dimension]."""

    passage: Passage
    vector: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The candidates of one query.

    Attributes:
        passages: the best passages by the store's own scores, in any order.
        rest: upper bound of the store's own scores of all other passages; ``-inf`` if no relevant passage is left.
    """

    passages: Sequence[Fetched]
    rest: float = -math.inf


class Store(Protocol):
    """A collection of passages in a database. Safe to use from several threads.

    Every method may raise :class:`~specrag.errors.StoreUnavailable` if the database does not answer in time, and
    :class:`~specrag.retrieval.manifest.KnowledgeBaseError` if the collection is gone or of another kind. No message
    contains a password.
    """

    place: str
    """The collection and its server, for messages, such as ``qdrant: collection 'notes' at db:6333``."""

    def info(self) -> StoreInfo:
        """What the store holds now, from the database."""

    def add(self, passages: Sequence[Passage], vectors: Floats) -> None:
        """Add passages, replacing those with the same ids; they can be found as soon as this returns.

        Args:
            passages: with ids from 0 to 2^63 - 1, each once.
            vectors: float32 [passages, dimension], finite.
        """

    def remove(self, ids: Sequence[int]) -> None:
        """Remove passages; unknown ids are ignored."""

    def fetch(self, ids: Sequence[int]) -> list[Fetched]:
        """These passages, in any order; unknown ids are left out."""

    def search(
        self, vectors: Floats, most: int, filter: Filter | None = None, breadth: int | None = None
    ) -> list[Found]:
        """Candidates by inner product, for all queries in one request.

        Args:
            vectors: float32 [queries, dimension].
            most: return for each query at least this many if there are, or all that can be among the best ``most``.
            filter: passages that do not satisfy it may be left out, but may also be returned.
            breadth: candidates of an approximate search; ``None`` for an exact one.
        """

    def close(self) -> None:
        """Close all connections."""


@dataclass(frozen=True, slots=True, eq=False)
class Collection:
    """Passages and vectors to load.

    Args:
        ids: ids of the passages, int64, each once.
        vectors: returns the vectors for some ids, float32 [ids given, dimension].
        passages: returns the passages for some ids.
        encoder: the encoder that made the vectors.
    """

    ids: Longs
    vectors: Callable[[Longs], Floats]
    passages: Callable[[Sequence[int]], Sequence[Passage]]
    encoder: EncoderRecord

    @classmethod
    def of(cls, knowledge_base: KnowledgeBase) -> Collection:
        """All passages of a knowledge base, which must stay open meanwhile."""
        made = knowledge_base.manifest.encoder
        return cls(knowledge_base.ids, knowledge_base.vectors, knowledge_base.passages, made)

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, number: int, parts: int) -> Collection:
        """One of several parts of about equal size: a passage's id determines its part."""
        return replace(self, ids=self.ids[self.ids % parts == number])

    def portions(self, progress: Reporter) -> Iterator[tuple[Sequence[Passage], Floats]]:
        """All passages with their vectors, some at a time."""
        for first in range(0, len(self), BATCH):
            progress(Progress("loading", first, len(self)))
            ids = self.ids[first : first + BATCH]
            yield self.passages(ids.tolist()), self.vectors(ids)
        progress(Progress("loading", len(self), len(self)))


@dataclass(frozen=True, slots=True)
class Loading:
    """How a collection is loaded.

    Args:
        approximate: build an index for approximate search.
        replace: replace an existing collection with this name, if specrag has made it.
        progress: receives the progress of the stages ``loading`` and ``indexing``.
        limits: timeouts.
    """

    approximate: bool = False
    replace: bool = False
    progress: Reporter = lambda _: None
    limits: Limits = field(default_factory=Limits)


class StoreType(Protocol):
    """A kind of store: the object of an entry point in the group ``specrag.stores``, named by its address scheme.

    All methods may raise an :class:`~specrag.errors.InputError` for an address that cannot be used; its message does
    not show the address, which may hold a password.
    """

    def open(self, address: str, limits: Limits) -> Store:
        """Open an existing collection.

        Raises:
            StoreUnavailable: the database cannot be reached.
            KnowledgeBaseError: the collection does not exist, is unfinished, or was not made by specrag.
        """

    def check(self, address: str, loading: Loading) -> None:
        """Check whether :meth:`load` can succeed, before a long build.

        Raises:
            SpecragError: it would fail.
        """

    def load(self, address: str, collection: Collection, loading: Loading) -> StoreInfo:
        """Load passages and vectors into a new collection; after an interrupted load it cannot be opened.

        Raises:
            InputError: it already exists.
            StoreUnavailable: the database cannot be reached, or goes away.
        """


class Closing:
    """A context manager that calls :meth:`close` at the end."""

    def close(self) -> None:
        """Release everything."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_vectors(vectors: Floats, dimension: int) -> None:
    """Check vectors that are to be stored.

    Raises:
        InputError: they have another shape or type, or are not finite.
    """
    if vectors.dtype != np.float32 or vectors.ndim != 2 or vectors.shape[1] != dimension:
        shape = f"{vectors.dtype} {list(vectors.shape)}"
        raise InputError("vectors", shape, f"give float32 [passages, {dimension}]")
    if not float(largest_norm(np.ascontiguousarray(vectors))) <= LONGEST:
        raise InputError("vectors", "not finite", "give finite numbers of a length below 2^60")


def field_values(passage: Passage) -> dict[str, list[Scalar]]:
    """The values that conditions compare, by field: source, title, place and metadata."""
    values: dict[str, list[Scalar]] = {}
    values |= flatten(passage.metadata)
    values |= {"source": [passage.source], "title": [passage.title], "place": [passage.place]}
    return values


def to_payload(passage: Passage) -> dict[str, Any]:
    """A passage's fields as JSON values, without its id."""
    return {
        "source": passage.source,
        "title": passage.title,
        "place": passage.place,
        "text": passage.text,
        "metadata": storable(dict(passage.metadata)),
    }


def from_payload(id: int, payload: Mapping[str, Any], place: str) -> Passage:
    """Read what :func:`to_payload` wrote.

    Raises:
        KnowledgeBaseError: it has another form.
    """
    try:
        source, title, place_, text = (str(payload[name]) for name in ("source", "title", "place", "text"))
        return Passage(id, source, title, place_, text, payload["metadata"] or {})
    except (KeyError, TypeError) as error:
        raise KnowledgeBaseError(
            f"{place}: passage {id} is not as specrag writes it: load the knowledge base again"
        ) from error


def storable(value: Any) -> Any:
    """A metadata value in a form that databases accept.

    Numbers that JSON cannot represent become ``None``, whole numbers of more than 64 bits floating-point numbers.
    """
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        value = float(value) if abs(value) < _LARGEST else math.inf
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): storable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [storable(item) for item in value]
    return value


_LARGEST = 2**1023


_COLUMNS = ("source", "title", "place")
_MOST_DOTS = 6


def key_paths(field: str) -> list[list[str]]:
    """The paths of metadata keys, outermost key first, that a dotted name may stand for.

    ``a.b.c`` may mean the key "c" in "b" in "a", but also the key "b.c" in "a", and so on.
    """
    parts = field.split(".")
    if len(parts) - 1 > _MOST_DOTS:
        return [parts]
    paths = []
    for joined in product((False, True), repeat=len(parts) - 1):
        path = [parts[0]]
        for part, same in zip(parts[1:], joined, strict=True):
            path[-1:] = [f"{path[-1]}.{part}"] if same else [path[-1], part]
        paths.append(path)
    return paths


def is_column(field: str) -> bool:
    """Whether a field is one that every passage has, not one of its metadata."""
    return field in _COLUMNS


def batches(passages: Sequence[Passage], vectors: Floats) -> Iterator[tuple[Sequence[Passage], Floats]]:
    """Passages and vectors in portions of :data:`BATCH`."""
    for first in range(0, len(passages), BATCH):
        yield passages[first : first + BATCH], vectors[first : first + BATCH]


@dataclass(frozen=True, slots=True)
class Address:
    """The parsed URL of a collection on a server.

    Attributes:
        host, port: host and port of the server.
        name: name of the collection.
        database: database that holds it; empty for the default.
        user: empty for none.
        secret: a password or key; never shown.
        secure: whether the connection is encrypted.
    """

    host: str
    port: int
    name: str
    database: str
    user: str
    secret: str = field(repr=False)
    secure: bool

    @classmethod
    def parse(cls, text: str, kind: str, port: int) -> Address:
        """Read ``KIND://[USER:SECRET@]HOST[:PORT]/[DATABASE/]NAME``, or ``KIND+https://...``.

        Raises:
            InputError: it has another form. The message does not show it, since it may hold a password.
        """
        remedy = f"give {kind}://HOST:PORT/NAME, or {kind}+https://..., with / : @ in names and keys as %2F %3A %40"
        try:
            url: SplitResult = urlsplit(text)
            found = cls(
                host=url.hostname or "",
                port=url.port or port,
                name=unquote(url.path.rpartition("/")[2]),
                database=unquote(url.path.rpartition("/")[0].strip("/")),
                user=unquote(url.username or ""),
                secret=unquote(url.password or ""),
                secure=url.scheme.endswith("+https"),
            )
        except ValueError:
            raise InputError("store", "(not shown)", remedy) from None
        if not found.host or not found.name or url.query or url.fragment or "@" in url.path:
            raise InputError("store", "(not shown)", remedy)
        return found

    def place(self, kind: str) -> str:
        """The collection and its server, for messages."""
        return f"{kind}: collection {self.name!r} at {self.host}:{self.port}"

    def reach(self, words: Words) -> None:
        """Check that something listens there, within the connect timeout.

        The client libraries do not tell a timeout for connecting from other timeouts.

        Raises:
            StoreUnavailable: nothing does.
        """
        try:
            socket.create_connection((self.host, self.port), words.limits.connect_timeout).close()
        except (OSError, UnicodeError) as error:
            raise words.unreachable(error) from None


def keep_trying(
    limits: Limits, request: Callable[[float], T], is_transient: Callable[[Exception], bool]
) -> T:
    """Send a request that may safely be repeated, and retry it after transient failures.

    Args:
        limits: time limit and number of retries.
        request: called with the seconds that are left.
        is_transient: says whether another attempt may succeed.

    Raises:
        Exception: that of the last attempt, unchanged.
    """
    deadline = time.monotonic() + limits.timeout
    for attempt in range(limits.retries):
        try:
            return request(deadline - time.monotonic())
        except Exception as error:
            pause = FIRST_PAUSE * 2**attempt
            if not is_transient(error) or time.monotonic() + pause >= deadline:
                raise
            time.sleep(pause)
    return request(max(deadline - time.monotonic(), FIRST_PAUSE))


@dataclass(slots=True)
class Words:
    """Makes a store's errors, with readable messages that reveal no secret.

    Args:
        place: as in :attr:`Store.place`.
        limits: the limits that messages mention.
        secrets: replaced in all messages of libraries.
    """

    place: str
    limits: Limits
    secrets: Sequence[str] = field(default=(), repr=False)

    def reason(self, error: object) -> str:
        """A library's message, on one line and without secrets."""
        text = " ".join(str(error).split())
        for secret in self.secrets:
            if secret:
                text = text.replace(secret, "***")
        return text if len(text) <= 200 else f"{text[:197]}..."

    def unreachable(self, error: object) -> StoreUnavailable:
        """The error for a server that does not answer."""
        return StoreUnavailable(
            f"{self.place} cannot be reached ({self.reason(error)}): make sure that it runs there and that the "
            "address is right"
        )

    def too_late(self) -> StoreUnavailable:
        """The error for a server that does not answer in time."""
        return StoreUnavailable(
            f"{self.place} did not answer within {self.limits.timeout:g} seconds: "
            "look what the database is busy with, or give it more time"
        )

    def refused(self, error: object) -> StoreUnavailable:
        """The error for insufficient credentials or rights."""
        return StoreUnavailable(
            f"{self.place} refuses ({self.reason(error)}): give a user or key that may read and write there"
        )

    def unusable(self, error: object) -> StoreUnavailable:
        """The error for anything else."""
        return StoreUnavailable(
            f"{self.place} cannot be used ({self.reason(error)}): ask whoever runs the database"
        )

    def check_complete(self, info: StoreInfo) -> None:
        """Refuse a collection whose load has not finished.

        Raises:
            KnowledgeBaseError: it has not.
        """
        if not info.complete:
            raise KnowledgeBaseError(
                f"{self.place} is being loaded, or its load was cut off: wait for it, or load it again and replace it"
            )

    def missing(self) -> SpecragError:
        """The error for a collection that does not exist."""
        return KnowledgeBaseError(
            f"{self.place} does not exist: load a knowledge base into it, or name another one"
        )

    def closed(self) -> StoreUnavailable:
        """The error for a store that was closed by this program."""
        return StoreUnavailable(f"{self.place} has been closed: open it again")
