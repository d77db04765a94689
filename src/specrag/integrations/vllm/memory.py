"""Earlier answers that requests of the same tenant may copy from."""

from __future__ import annotations

from specrag.integrations.vllm.copying import Found, Ints
from specrag.speculation.suffix import SuffixAutomaton

#: Tokens of a row that are looked up.
_LONGEST = 32


class AnswerMemory:
    """The answers of each tenant, indexed; in memory only, so that a restart begins with none.

    A suffix automaton forgets its newest tokens only, so answers are kept in parts of half the size, and the oldest
    part goes as a whole, whoever's it is.

    Args:
        tokens: the most that are kept, of all tenants together; 0 for none.
    """

    def __init__(self, tokens: int) -> None:
        self._most = tokens
        self._parts: list[tuple[str, SuffixAutomaton]] = []  # the oldest first

    def __len__(self) -> int:
        return sum(len(part) for _, part in self._parts)

    def add(self, tenant: str, answer: Ints) -> None:
        """Keep an answer, as much of it as there is room for; nothing without a tenant."""
        size = self._most // 2
        answer = answer[: size - 1]
        if not tenant or len(answer) < 2 or len(answer) >= size:
            return
        part = next((part for owner, part in reversed(self._parts) if owner == tenant), None)
        if part is None or len(part) + len(answer) + 1 > size:
            part = SuffixAutomaton()
            self._parts.append((tenant, part))
        part.extend(answer)
        part.end_text()
        while len(self) > self._most:
            del self._parts[0]

    def find(self, tenant: str, tail: Ints) -> Found | None:
        """The longest suffix of ``tail`` in the answers of a tenant, the newest answers first."""
        best: Found | None = None
        for owner, part in reversed(self._parts):
            if tenant and owner == tenant:
                match = part.match(tail, _LONGEST)
                if match.length > (best.match.length if best else 0):
                    best = Found(part, part.tokens, match, "answers")
        return best
