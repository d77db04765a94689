"""The rows of vLLM's batches, matched to what is known of each.

vLLM names no requests to a proposer, and moves rows: one that ends is replaced by the last, one that is preempted
leaves and comes back elsewhere. So a row is known by its text: how long it was at the last call, its newest tokens
then, and a few tokens at random places, which nobody outside can guess. A mistake would cost guesses, never a wrong
output, since vLLM verifies them. Where the requests' names can be seen they must agree too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrag.engine import compiled
from specrag.integrations.vllm.copying import NO_CHAIN, Acceptance, Chain, Ints
from specrag.integrations.vllm.requests import UNNAMED, Request
from specrag.speculation.drafters import RequestText

#: Tokens indexed in one call: a long prompt is indexed in pieces, most of them while vLLM reads it.
_MOST_INDEXED = 4096
#: Newest tokens and random places that must agree.
_NEWEST, _PLACES = 32, 16
#: Rows that left without ending are kept for their return: so many, of so many tokens together.
_MOST_AWAY, _MOST_TOKENS_AWAY = 64, 1 << 18


class Batch(NamedTuple):
    """What vLLM tells in a call.

    Attributes:
        sampled: by row the tokens that the last step gave; none while a prompt is being read.
        lengths: tokens of each row, the sampled ones included.
        tokens: int32 ``[more rows, most tokens]``.
        requests: by row, where they can be seen.
    """

    sampled: Sequence[Sequence[int]]
    lengths: Sequence[int]
    tokens: Ints
    requests: Sequence[Request]

    def known(self, row: int) -> int:
        """Tokens of a row before the last step."""
        return self.lengths[row] - len(self.sampled[row])


@dataclass(slots=True, eq=False)
class Row:
    """What is known of a row.

    Attributes:
        request: whose row it is.
        prompt: tokens of its prompt.
        places: between 0 and 1, where its text is compared.
        text: its tokens, indexed behind those of its passages.
        tokens: of the index, its passages' included.
        length: tokens of the row at the last call; they need not all be indexed yet.
        last: the token at the end of them.
        fresh: tokens at the end of them that were new; none where the row was.
        acceptance: of its own guesses.
        chain: guessed at the last call.
        sent: of the chain, the guesses that were given to vLLM.
        remembered: tokens of the row that the answer memory has, its prompt included.
    """

    request: Request
    prompt: int
    places: NDArray[np.float64]
    text: RequestText
    tokens: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    length: int = 0
    last: int = -1
    fresh: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance.of_one)
    chain: Chain = NO_CHAIN
    sent: int = 0
    remembered: int = 0

    @property
    def indexed(self) -> int:
        """Tokens of the row that are indexed."""
        return len(self.tokens) - self.text.offset

    @property
    def is_whole(self) -> bool:
        """Whether all of it is indexed."""
        return self.indexed == self.length

    def is_of(self, row: int, batch: Batch) -> bool:
        """Whether a batch's row is this one, with as many tokens as at the last call or more."""
        if not 0 < self.length <= batch.known(row):
            return False
        if batch.requests and batch.requests[row].name != self.request.name:
            return False
        if batch.tokens[row, self.length - 1] != self.last:
            return False
        return bool(_agree(self.tokens, self.text.offset, batch.tokens, row, self.places))

    def follow(self, tokens: Ints, length: int, budget: int) -> int:
        """Take in a row's new tokens.

        Args:
            tokens: of the row, ``length`` of them and more.
            length: tokens of the row now.
            budget: the most to index.

        Returns:
            How many were indexed.
        """
        start = self.indexed
        end = min(length, start + budget)
        if end > start:
            self.text.automaton.extend(tokens[start:end])
            self.tokens = self.text.automaton.tokens
        self.fresh = length - self.length if self.length else 0
        self.length, self.last = length, int(tokens[length - 1])
        return end - start

    def answer(self) -> Ints:
        """What was written since the answer memory was told, as far as it is indexed."""
        start = self.text.offset + max(self.remembered, self.prompt)
        return self.tokens[start:]


class Rows:
    """The rows of the last batch, and those that left it without ending."""

    def __init__(self) -> None:
        self._present: list[Row] = []
        self._away: list[Row] = []
        self._random = np.random.default_rng()

    def __len__(self) -> int:
        return len(self._present) + len(self._away)

    def follow(self, batch: Batch) -> tuple[list[Row], list[Row]]:
        """Find each row of a batch, or begin it, and take in what is new.

        Returns:
            The batch's rows in their order, and the rows that were there at the last call and are not in this one.
        """
        count = len(batch.sampled)
        found: list[Row | None] = [None] * count
        left: list[Row] = []
        for place, row in enumerate(self._present):
            if place < count and row.is_of(place, batch):
                found[place] = row
            else:
                left.append(row)
        unclaimed = left + self._away
        rows: list[Row] = []
        for place, known in enumerate(found):
            row = known or _claim(unclaimed, place, batch) or self._begin(place, batch)
            rows.append(row)
        budget = _MOST_INDEXED
        for place, row in enumerate(rows):
            budget -= row.follow(batch.tokens[place], batch.lengths[place], budget)
        self._present = rows
        self._away = unclaimed
        return rows, [row for row in left if row in unclaimed]

    def drop(self, has_ended: Callable[[Row], bool]) -> None:
        """Forget rows that left and will not return, and the longest gone of the others where they are too many."""
        self._away = [row for row in self._away if not has_ended(row)]
        tokens = 0
        for count, row in enumerate(self._away):
            tokens += row.length
            if count == _MOST_AWAY or tokens > _MOST_TOKENS_AWAY:
                del self._away[count:]
                return

    def _begin(self, place: int, batch: Batch) -> Row:
        request = batch.requests[place] if batch.requests else UNNAMED
        text = RequestText(request.passages())
        return Row(request, batch.known(place), self._random.random(_PLACES), text, text.automaton.tokens)


def _claim(unclaimed: list[Row], place: int, batch: Batch) -> Row | None:
    """Take out the row that a batch's row is; the longest where several agree."""
    same = [row for row in unclaimed if row.is_of(place, batch)]
    if not same:
        return None
    row = max(same, key=lambda row: row.length)
    unclaimed.remove(row)
    return row


@compiled
def _agree(indexed: Ints, offset: int, batch: Ints, row: int, places: NDArray[np.float64]) -> bool:
    """Whether a batch's row begins with what is indexed behind ``offset``, as far as is looked."""
    count = len(indexed) - offset
    tokens = batch[row]
    for back in range(1, min(count, _NEWEST) + 1):
        if indexed[offset + count - back] != tokens[count - back]:
            return False
    for share in places:
        place = int(share * count)
        if count > 0 and indexed[offset + place] != tokens[place]:
            return False
    return True
