"""Keeps the keys and values of earlier texts for requests that begin with the same tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specrag.engine.passes import SessionModel
from specrag.engine.session import Session
from specrag.errors import InputError

#: A shorter common prefix is not worth its own extent.
MIN_SHARED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Known:
    """An entry that shares a prefix with a text; one held on request has no key."""

    key: int | None
    session: Session
    shared: int

    @property
    def rank(self) -> tuple[int, bool]:
        """The more tokens the better; of as many, those that were read rather than pasted."""
        return self.shared, not self.session.pasted


class PrefixCache:
    """An LRU cache of sessions: prompts, with the answers behind them. Tenants never share entries.

    A tenant can observe nothing of another: neither its tokens nor, from response times, whether they were cached.
    Use it only from coroutines of one executor, which never run at the same time.

    Args:
        limit_bytes: most bytes of keys and values to hold; 0 keeps nothing.
    """

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 0:
            raise InputError("limit_bytes", limit_bytes, "give a number of bytes, 0 for no cache")
        self.limit_bytes = limit_bytes
        self._entries: OrderedDict[int, tuple[str, Session]] = OrderedDict()
        self._held: list[tuple[str, Session]] = []
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Bytes kept. Buffers that several entries share count once; sessions held on request do not count."""
        return _nbytes(session for _, session in self._entries.values())

    def start(
        self, model: SessionModel, tokens: Sequence[int], tenant: str = "", *, pasted: bool = False
    ) -> Session:
        """A session with the longest prefix of ``tokens`` that is known for this tenant and model.

        The session holds at most ``len(tokens) - 1`` of them: extend it with the rest.

        Args:
            pasted: also take sessions with pasted tokens, an approximation.
        """
        self._shrink()
        best = self._longest(model, tokens, tenant, pasted=pasted)
        if best is None:
            return Session(model)
        if best.key is not None:
            self._entries.move_to_end(best.key)
        return best.session.fork(min(best.shared, len(tokens) - 1))

    def known(self, model: SessionModel, tokens: Sequence[int], tenant: str = "") -> int:
        """How many of these tokens :meth:`start` would find."""
        best = self._longest(model, tokens, tenant)
        return 0 if best is None else min(best.shared, len(tokens) - 1)

    def keep(
        self, session: Session, tenant: str = "", length: int | None = None, *, pasted: bool = False
    ) -> None:
        """Remember a session's first tokens, by default all; the session can still be used.

        An entry equals what a prefill would give. So a session with pasted tokens is not kept, unless ``pasted``
        allows it; then it is found by those alone that ask for one, and only as a whole.
        """
        tokens = session.tokens[:length]
        if session.pasted and not pasted:
            return
        if _nbytes([session]) > self.limit_bytes or len(tokens) < MIN_SHARED_TOKENS:
            return
        for key, (owner, other) in list(self._entries.items()):
            if (
                owner != tenant
                or other.model is not session.model
                or bool(other.pasted) != bool(session.pasted)
            ):
                continue
            if other.tokens == tokens or (not session.pasted and other.tokens[: len(tokens)] == tokens):
                self._entries.move_to_end(key)
                return
            # An entry that is a prefix of the new one adds nothing, unless it is found only as a whole.
            if not session.pasted and tokens[: len(other)] == other.tokens:
                del self._entries[key]
        self._entries[self._next] = (tenant, session.fork(len(tokens)))
        self._next += 1
        self._shrink()

    def hold(self, session: Session, tenant: str = "") -> None:
        """Remember a session's tokens until :meth:`release`, regardless of the limit; its size is up to the caller."""
        self._held.append((tenant, session))

    def release(self, session: Session) -> None:
        """Stop holding a session."""
        self._held = [entry for entry in self._held if entry[1] is not session]

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._held.clear()

    def _longest(
        self, model: SessionModel, tokens: Sequence[int], tenant: str, *, pasted: bool = False
    ) -> _Known | None:
        best: _Known | None = None
        known = [*self._entries.items(), *((None, entry) for entry in self._held)]
        for key, (owner, session) in known:
            if owner == tenant and session.model is model:
                shared = _common(session.tokens, tokens)
                if session.pasted and not (pasted and shared == len(session)):
                    continue
                found = _Known(key, session, shared)
                if shared >= MIN_SHARED_TOKENS and (best is None or found.rank > best.rank):
                    best = found
        return best

    def _shrink(self) -> None:
        """Drop the least recently used. Kept sessions may have grown their buffers since, so call it often."""
        while self._entries and self.nbytes > self.limit_bytes:
            self._entries.popitem(last=False)


def _nbytes(sessions: Iterable[Session]) -> int:
    extents = {id(extent): extent for session in sessions for extent in session.cache.extents()}
    return sum(extent.nbytes for extent in extents.values())


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    count = 0
    for left, right in zip(first, second, strict=False):
        if left != right:
            break
        count += 1
    return count
