"""A model that rates replies in conversations, as LLM-as-a-judge does (Zheng et al., 2023), by probabilities.

The rating is the mean of 1 to 5 under the judge's distribution over these digits (as G-Eval, Liu et al., 2023), which
tells more than the likeliest digit of a small model does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specrag.engine.outputs import Outputs
from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.methods.prompts import Message
from specrag.methods.rapid.prompt import encode
from specrag.speculation.tree import EMPTY

if TYPE_CHECKING:
    from specrag.language_model import LanguageModel

_DIGITS = "12345"
_ASKED = (
    "Rate the last reply of the assistant for helpfulness, relevance and accuracy, from 1 (very bad) to 5 (excellent). "
    "Answer with the number alone."
)


class Judge:
    """Rates; loaded when first asked.

    Args:
        name, device: of the model.
    """

    def __init__(self, name: str, device: str) -> None:
        self.name = name
        self._device = device
        self._loaded: LanguageModel | None = None
        self._known: dict[tuple[int, ...], float] = {}

    def close(self) -> None:
        """Give the memory back."""
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None

    def rating(self, messages: Sequence[Message], reply: str) -> float:
        """From 1 to 5.

        Args:
            messages: the conversation that the reply belongs to, the question last.
        """
        if self._loaded is None:
            from specrag.language_model import load

            self._loaded = load(self.name, device=self._device)
        llm = self._loaded
        said = [*messages, {"role": "assistant", "content": reply}]
        text = "\n\n".join(f"{message['role'].capitalize()}: {message['content']}" for message in said)
        tokens = encode(llm.tokenizer, [{"role": "user", "content": f"{text}\n\n{_ASKED}"}])
        if tuple(tokens) not in self._known:
            digits = tuple(llm.tokenizer.encode(digit, special=False)[-1] for digit in _DIGITS)
            nats = llm.executor.run(llm.executor.submit(_nats(Session(llm.model), tokens, digits)))
            weights = np.exp(nats)
            self._known[tuple(tokens)] = float(weights @ np.arange(1, 6) / weights.sum())
        return self._known[tuple(tokens)]


def _nats(session: Session, tokens: Sequence[int], digits: tuple[int, ...]) -> Coroutine[np.ndarray]:
    """The log-probabilities of some tokens behind others, in float64."""
    try:
        yield from session.extend(tokens)
        (row,) = yield from session.score(EMPTY, Outputs(log_probs_of=digits))
    finally:
        session.close()
    return np.asarray(row.log_probs, dtype=np.float64)
