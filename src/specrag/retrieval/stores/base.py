"""The protocol of stores: databases elsewhere that keep passages with their vectors.

A store hands over candidates; it ranks nothing. :class:`~specrag.retrieval.stores.retriever.StoreRetriever` scores
them by the one kernel, asks for more where the store's own rounding might have hidden one, and checks conditions once
more, so that every store gives the same passages with the same scores, bit for bit.
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
"""The version of what a store keeps: the passages' fields, and the record beside them."""

BATCH = 256
"""Passages that are written at a time."""

FIRST_PAUSE = 0.05
"""Seconds before a request is sent again; doubled before each further attempt."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a store may take, and how often it is asked.

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
            check_number(name, getattr(self, name), above=0, remedy="give a number of seconds above 0")
        for name, least in (("retries", 0), ("connections", 1)):
            check_whole(name, getattr(self, name), least)


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """What a search must know of a store.

    Attributes:
        passages: their number.
        encoder: that made the vectors.
        longest: at least the greatest Euclidean length of a vector, which bounds the store's rounding error.
        fields: that conditions can name.
        breadth: candidates of an approximate search; ``None`` where there is no such index.
        lists: of the fields those that hold a list in some passage.
        complete: whether it has been loaded to its end.
    """

    passages: int
    encoder: EncoderRecord
    longest: float = 0.0
    fields: tuple[str, ...] = ("place", "source", "title")
    breadth: int | None = None
    lists: tuple[str, ...] = ()
    complete: bool = True

    def with_passages(self, passages: Sequence[Passage], vectors: Floats) -> StoreInfo:
        """The same after these have been added; how many there are then, the store counts itself.

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
            place: of the store, for errors.
            passages: their number, where the database has counted them.

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
            graph = content.get("hnsw") or {}  # as earlier versions of specrag wrote it
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
    """The fields, named as by :func:`flatten`, whose value is a list."""
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
        passages: the best ones by the store's own scores, in any order.
        rest: no other passage has a greater score of the store's own; ``-inf`` where none is left that matters.
    """

    passages: Sequence[Fetched]
    rest: float = -math.inf


class Store(Protocol):
    """A collection of passages in a database. Safe to use from several threads.

    Every method may raise :class:`~specrag.errors.StoreUnavailable` where the database does not answer in time, and
    :class:`~specrag.retrieval.manifest.KnowledgeBaseError` where the collection is gone or of another kind. No message
    holds a password.
    """

    place: str
    """The collection and its server, for messages, such as ``qdrant: collection 'notes' at db:6333``."""

    def info(self) -> StoreInfo:
        """What there is now; asks the database."""

    def add(self, passages: Sequence[Passage], vectors: Floats) -> None:
        """Add passages, or replace those of the same ids; they can be found as soon as this returns.

        Args:
            passages: with ids from 0 to 2^63 - 1, each once.
            vectors: float32 [passages, dimension], finite.
        """

    def remove(self, ids: Sequence[int]) -> None:
        """Remove passages; ids that are not there do not matter."""

    def fetch(self, ids: Sequence[int]) -> list[Fetched]:
        """These passages, in any order, without those that are not there."""

    def search(
        self, vectors: Floats, most: int, filter: Filter | None = None, breadth: int | None = None
    ) -> list[Found]:
        """Candidates by inner product, for all queries in one request.

        Args:
            vectors: float32 [queries, dimension].
            most: for each query at least so many, if there are, or all that can be among the best ``most``.
            filter: only passages that satisfy it need be found; others may be.
            breadth: candidates of an approximate search; ``None`` for an exact one.
        """

    def close(self) -> None:
        """Let all connections go."""


@dataclass(frozen=True, slots=True, eq=False)
class Collection:
    """Passages and vectors to load.

    Args:
        ids: of the passages, int64, each once.
        vectors: gives those of some ids, float32 [ids given, dimension].
        passages: gives some by their ids.
        encoder: that made the vectors.
    """

    ids: Longs
    vectors: Callable[[Longs], Floats]
    passages: Callable[[Sequence[int]], Sequence[Passage]]
    encoder: EncoderRecord

    @classmethod
    def of(cls, knowledge_base: KnowledgeBase) -> Collection:
        """All of a knowledge base, which must stay open meanwhile."""
        made = knowledge_base.manifest.encoder
        return cls(knowledge_base.ids, knowledge_base.vectors, knowledge_base.passages, made)

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, number: int, parts: int) -> Collection:
        """One of several parts that are about equally large: a passage's id says which one it belongs to."""
        return replace(self, ids=self.ids[self.ids % parts == number])

    def portions(self, progress: Reporter) -> Iterator[tuple[Sequence[Passage], Floats]]:
        """Everything, some passages at a time."""
        for first in range(0, len(self), BATCH):
            progress(Progress("loading", first, len(self)))
            ids = self.ids[first : first + BATCH]
            yield self.passages(ids.tolist()), self.vectors(ids)
        progress(Progress("loading", len(self), len(self)))


@dataclass(frozen=True, slots=True)
class Loading:
    """How a collection is loaded.

    Args:
        approximate: with an index for approximate search.
        replace: in the place of one of this name that specrag has made.
        progress: is told of the stages ``loading`` and ``indexing``.
        limits: time-outs.
    """

    approximate: bool = False
    replace: bool = False
    progress: Reporter = lambda _: None
    limits: Limits = field(default_factory=Limits)


class StoreType(Protocol):
    """A kind of store: what an entry point of the group ``specrag.stores`` names, under the scheme of its addresses.

    All of these may raise an :class:`~specrag.errors.InputError` for an address that cannot be used, whose message does
    not show it, since it may hold a password.
    """

    def open(self, address: str, limits: Limits) -> Store:
        """A collection that is there.

        Raises:
            StoreUnavailable: the database cannot be reached.
            KnowledgeBaseError: the collection is not there, is unfinished, or specrag has not made it.
        """

    def check(self, address: str, loading: Loading) -> None:
        """Check before a long build whether :meth:`load` can succeed.

        Raises:
            SpecragError: it would not.
        """

    def load(self, address: str, collection: Collection, loading: Loading) -> StoreInfo:
        """Load passages and vectors into a new collection; one that is cut off cannot be opened.

        Raises:
            InputError: it is there already.
            StoreUnavailable: the database cannot be reached, or goes away.
        """


class Closing:
    """A context manager that closes."""

    def close(self) -> None:
        """Let everything go."""
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
    """What conditions compare: source, title, place and metadata."""
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
    """What :func:`to_payload` wrote.

    Raises:
        KnowledgeBaseError: it is not that.
    """
    try:
        source, title, place_, text = (str(payload[name]) for name in ("source", "title", "place", "text"))
        return Passage(id, source, title, place_, text, payload["metadata"] or {})
    except (KeyError, TypeError) as error:
        raise KnowledgeBaseError(
            f"{place}: passage {id} is not as specrag writes it: load the knowledge base again"
        ) from error


def storable(value: Any) -> Any:
    """A value of metadata as databases take it.

    Numbers that JSON has not become ``None``, and whole numbers of more than 64 bits floating-point numbers.
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
    """The keys of metadata, from the outside to the inside, that a dotted name may stand for.

    ``a.b.c`` means the key "c" in "b" in "a", and also the key "b.c" in "a", and so on.
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
    """Whether a field is one of every passage, and not of its metadata."""
    return field in _COLUMNS


def batches(passages: Sequence[Passage], vectors: Floats) -> Iterator[tuple[Sequence[Passage], Floats]]:
    """Passages and vectors in portions of :data:`BATCH`."""
    for first in range(0, len(passages), BATCH):
        yield passages[first : first + BATCH], vectors[first : first + BATCH]


@dataclass(frozen=True, slots=True)
class Address:
    """A collection of a server, by its URL.

    Attributes:
        host, port: of the server.
        name: of the collection.
        database: that holds it; empty for the usual.
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
            InputError: it is not that. The message does not show it: it may hold a password.
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
        """For messages."""
        return f"{kind}: collection {self.name!r} at {self.host}:{self.port}"

    def reach(self, words: Words) -> None:
        """Look whether somebody listens there, in the time for connecting, which the libraries do not tell apart.

        Raises:
            StoreUnavailable: nobody does.
        """
        try:
            socket.create_connection((self.host, self.port), words.limits.connect_timeout).close()
        except (OSError, UnicodeError) as error:
            raise words.unreachable(error) from None


def keep_trying(
    limits: Limits, request: Callable[[float], T], is_transient: Callable[[Exception], bool]
) -> T:
    """Send a request that changes nothing, and send it again where it failed for a reason that may pass.

    Args:
        request: is given the seconds that are left.
        is_transient: whether another attempt may succeed.

    Raises:
        Exception: the last attempt's, as it came.
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
    """The errors of a store in words; shows no secret.

    Args:
        place: as :attr:`Store.place`.
        limits: for what to say of time.
        secrets: replaced in everything that a library says.
    """

    place: str
    limits: Limits
    secrets: Sequence[str] = field(default=(), repr=False)

    def reason(self, error: object) -> str:
        """What a library says, on one line without secrets."""
        text = " ".join(str(error).split())
        for secret in self.secrets:
            if secret:
                text = text.replace(secret, "***")
        return text if len(text) <= 200 else f"{text[:197]}..."

    def unreachable(self, error: object) -> StoreUnavailable:
        """Nobody answers there."""
        return StoreUnavailable(
            f"{self.place} cannot be reached ({self.reason(error)}): make sure that it runs there and that the "
            "address is right"
        )

    def too_late(self) -> StoreUnavailable:
        """It does not answer in time."""
        return StoreUnavailable(
            f"{self.place} did not answer within {self.limits.timeout:g} seconds: "
            "look what the database is busy with, or give it more time"
        )

    def refused(self, error: object) -> StoreUnavailable:
        """Credentials or rights are not enough."""
        return StoreUnavailable(
            f"{self.place} refuses ({self.reason(error)}): give a user or key that may read and write there"
        )

    def unusable(self, error: object) -> StoreUnavailable:
        """Anything else."""
        return StoreUnavailable(
            f"{self.place} cannot be used ({self.reason(error)}): ask whoever runs the database"
        )

    def check_complete(self, info: StoreInfo) -> None:
        """Refuse a collection whose load was cut off.

        Raises:
            KnowledgeBaseError: it was.
        """
        if not info.complete:
            raise KnowledgeBaseError(
                f"{self.place} is being loaded, or its load was cut off: wait for it, or load it again and replace it"
            )

    def missing(self) -> SpecragError:
        """The collection is not there."""
        return KnowledgeBaseError(
            f"{self.place} does not exist: load a knowledge base into it, or name another one"
        )

    def closed(self) -> StoreUnavailable:
        """It has been closed here."""
        return StoreUnavailable(f"{self.place} has been closed: open it again")
