"""A session: one sequence of tokens that a model is decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from specrag.engine.outputs import NOTHING, Outputs, Row
from specrag.engine.passes import Coroutine, Pass, PassReport, Segment, SessionModel
from specrag.errors import ContextLengthError, InputError, SpecragError

#: Most rows of one prefill pass: bounds its memory and the time that other requests wait for it.
PREFILL_ROWS = 512


class Tree(Protocol):
    """The part of a draft tree that a pass needs."""

    @property
    def tokens(self) -> Sequence[int]:
        """One token per node."""

    @property
    def parents(self) -> Sequence[int]:
        """The node that each node follows, -1 for the session's newest token; parents come first."""


@runtime_checkable
class Movable(Protocol):
    """A model whose keys can be rotated to another position."""

    def move(self, source: Any, first: int, last: int, target: Any) -> None:
        """Append rows ``first`` to ``last`` of one cache to another, with the keys rotated to their new positions."""


def check_room(model: SessionModel, length: int) -> None:
    """Check that the model's context holds ``length`` tokens.

    Raises:
        ContextLengthError: it does not.
    """
    limit = model.context_length
    if length > limit:
        raise ContextLengthError(
            "prompt",
            f"{length} tokens",
            f"the model's context holds {limit}; shorten it or take another model",
        )


class Session:
    """One sequence: committed tokens, and the model's cache of their keys and values.

    The newest committed token is *pending*: the cache does not hold it yet; the next pass feeds it.
    Methods that run passes are coroutines, driven by an executor (``yield from session.score(tree)``).

    Args:
        model: the model that decodes.
        cache: a cache that already holds the first tokens of ``tokens``; by default a new one.
        tokens: committed tokens, at least one more than ``cache`` holds unless both are empty.
        pasted: how many of them have keys and values that were computed elsewhere.

    Attributes:
        report: of the pass that scored last; ``None`` if whatever ran the pass does not report.
        pasted: tokens whose keys and values were computed behind another text (:meth:`paste`): what is decoded behind
            them is no longer what the model would write.
    """

    def __init__(
        self, model: SessionModel, cache: Any = None, tokens: Sequence[int] = (), pasted: int = 0
    ) -> None:
        self.model = model
        self.cache: Any = model.new_cache() if cache is None else cache
        self.tokens = list(tokens)
        self.pasted = pasted
        self.report: PassReport | None = None
        self._scored: Tree | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def pending(self) -> list[int]:
        """Committed tokens that the cache does not hold yet; at least the newest one."""
        return self.tokens[self.cache.length :]

    def extend(
        self,
        tokens: Sequence[int],
        outputs: Outputs | Sequence[Outputs] = NOTHING,
        chunk: int = PREFILL_ROWS,
        leave: int = 0,
    ) -> Coroutine[list[Row]]:
        """Commit tokens and feed all but the newest, in chunks.

        Args:
            tokens: the tokens to append.
            outputs: what each fed row returns: one for all, or one for each. The fed rows are the tokens that were
                pending, then ``tokens`` without the last.
            chunk: largest number of rows in a pass.
            leave: rows before the newest token's that are left for the next :meth:`score` to feed; they return nothing.

        Returns:
            One row for each fed token.

        Raises:
            ContextLengthError: before any work, if the model's context is too short.
        """
        check_room(self.model, len(self.tokens) + len(tokens))
        self._check_tokens(tokens)
        self._scored = None
        self._keep_newest_pending()
        fed = [*self.pending, *(int(token) for token in tokens)][: -1 - leave]
        wanted = [outputs] * len(fed) if isinstance(outputs, Outputs) else list(outputs)
        if len(wanted) != len(fed):
            raise SpecragError(f"outputs: {len(wanted)} given for {len(fed)} fed rows: give one for each")
        self.tokens.extend(int(token) for token in tokens)
        self.cache.reserve(len(self.tokens))
        return (yield from self._feed(fed, wanted, chunk, leave))

    def paste(self, source: Session, first: int, last: int, before: Sequence[int] = ()) -> Coroutine[None]:
        """Commit tokens of another session with their keys and values, rotated to their positions here.

        The keys and values were computed behind the other session's text, so this is an approximation. The method is
        ours; the idea is that of Prompt Cache and its followers (Gim et al. 2024).

        Args:
            source: a session of the same model, whose cache holds these tokens.
            first, last: the first of them, and the one behind the last.
            before: tokens to commit in front of them. They are fed in one pass with the pending ones; :meth:`extend`
                would leave the newest for a pass of its own.

        Raises:
            InputError: the model's keys cannot be moved.
            ContextLengthError: before any work, if the model's context is too short.
        """
        if not isinstance(self.model, Movable):
            raise InputError("reuse", "blocks", "this model's keys cannot be moved; take exact")
        check_room(self.model, len(self.tokens) + len(before) + last - first)
        self._check_tokens(before)
        self._scored = None
        self._keep_newest_pending()
        self.tokens.extend(int(token) for token in before)
        self.cache.reserve(len(self.tokens) + last - first)
        fed = self.pending
        yield from self._feed(fed, [NOTHING] * len(fed))
        self.model.move(source.cache, first, last, self.cache)
        self.tokens.extend(source.tokens[first:last])
        self.pasted += last - first
        self._keep_newest_pending()

    def score(self, tree: Tree, outputs: Outputs) -> Coroutine[list[Row]]:
        """Feed the pending tokens and a tree of guesses behind them, in one pass.

        Args:
            tree: the guesses; may be empty.
            outputs: what the newest committed token's row and every node's row return.

        Returns:
            ``[1 + len(tree.tokens)]`` rows: first the one for the newest committed token, then one for each node.

        Raises:
            ContextLengthError: before any work, if the model's context is too short.
        """
        if not self.tokens:
            raise InputError("session", self.tokens, "it holds no token yet; extend it first")
        self._keep_newest_pending()
        pending = self.pending
        count = len(pending)
        self._check_tokens(tree.tokens)
        parents: list[int] | None = None
        if any(parent != node - 1 for node, parent in enumerate(tree.parents)):
            parents = [*range(-1, count - 1), *(parent + count for parent in tree.parents)]
        segment = Segment(
            self.cache,
            [*pending, *tree.tokens],
            parents,
            [NOTHING] * (count - 1) + [outputs] * (1 + len(tree.tokens)),
        )
        check_room(self.model, self.cache.length + 1 + max(segment.depths()))
        rows: list[Row] = yield Pass(self.model, segment, unread=count - 1)
        self.report = segment.report
        self.cache.accept(range(count))
        self._scored = tree
        return rows[count - 1 :]

    def commit(self, path: Sequence[int], bonus: int | None = None) -> None:
        """Keep a path of the tree scored last and drop the rest of the tree.

        Args:
            path: nodes, from a child of the root downwards.
            bonus: a token to append after the path; it becomes the pending one.
        """
        tree = self._scored
        if tree is None:
            raise SpecragError("commit: no tree was scored since the session last changed; call score first")
        parent = -1
        for node in path:
            if tree.parents[node] != parent:
                raise InputError("path", list(path), "every node must be a child of the one before it")
            parent = node
        self._scored = None
        self.tokens.extend(int(tree.tokens[node]) for node in path)
        if bonus is not None:
            self._check_tokens([bonus])
            self.tokens.append(int(bonus))
        # Without a bonus the last accepted token stays pending, so its row is not kept.
        self.cache.accept(list(path) if bonus is not None else list(path[:-1]))
        self._keep_newest_pending()

    def truncate(self, length: int) -> None:
        """Drop all but the first ``length`` tokens."""
        if not 0 <= length <= len(self.tokens):
            raise InputError("length", length, f"give 0 to {len(self.tokens)}, the session's length")
        self._scored = None
        del self.tokens[length:]
        self.cache.truncate(min(self.cache.length, max(length - 1, 0)))

    def fork(self, length: int | None = None) -> Session:
        """A session that starts with the first ``length`` tokens of this one; by default all.

        It shares their keys and values; nothing is copied.
        """
        length = len(self.tokens) if length is None else length
        if not 0 <= length <= len(self.tokens):
            raise InputError("length", length, f"give 0 to {len(self.tokens)}, the session's length")
        shared = min(self.cache.length, max(length - 1, 0))
        return Session(self.model, self.cache.fork(shared), self.tokens[:length], self.pasted)

    def close(self) -> None:
        """Release the cache's memory; the session is empty afterwards."""
        self.tokens.clear()
        self._scored = None
        self.cache.clear()

    def _feed(
        self, fed: Sequence[int], wanted: Sequence[Outputs], chunk: int = PREFILL_ROWS, leave: int = 0
    ) -> Coroutine[list[Row]]:
        """Run committed tokens through the model, in chunks; ``leave`` more are left for a later pass."""
        rows: list[Row] = []
        for start in range(0, len(fed), chunk):
            part = fed[start : start + chunk]
            segment = Segment(self.cache, part, None, wanted[start : start + chunk])
            rows += yield Pass(self.model, segment, unread=len(fed) - start + leave)
            self.cache.accept(range(len(part)))
        return rows

    def _keep_newest_pending(self) -> None:
        """Have the newest token fed again if the cache holds it: scored, but then no path or bonus committed."""
        if self.cache.length >= len(self.tokens):
            self.cache.truncate(max(len(self.tokens) - 1, 0))

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        size = self.model.vocab_size
        for token in tokens:
            if not 0 <= token < size:
                raise InputError("token", token, f"the model's vocabulary has {size} tokens, numbered from 0")
