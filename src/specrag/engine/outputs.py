"""What is requested of each row of a pass, and the row's answer.

A pass can compute a logits vector for every row, but most rows do not need it: a prefill reads only its last row, a
greedy check only the largest entry. Each row therefore requests what it needs, and nothing else is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np


#: ``final``: the input of the output matrix (after the last norm); ``last``: the last layer's output before that
#: norm; ``ffn_input``: the input of the last layer's feed-forward block, after its norm (kNN-LM's key).
HiddenState = Literal["final", "last", "ffn_input"]


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs requested of one row. All refer to the raw logits: temperature 1, no truncation.

    Args:
        argmax: the token with the largest logit, the smallest id on a tie.
        top_k: how many of the most probable tokens to return with their log-probabilities.
        entropy: the entropy of the next-token distribution, in nats.
        logits: the whole vector ``[vocab_size]`` in float32.
        log_probs_of: tokens whose log-probabilities are wanted.
        hidden: hidden states to return.
    """

    argmax: bool = False
    top_k: int = 0
    entropy: bool = False
    logits: bool = False
    log_probs_of: tuple[int, ...] = ()
    hidden: tuple[HiddenState, ...] = ()

    @property
    def needs_logits(self) -> bool:
        """Whether the row has to go through the output matrix at all."""
        return self.argmax or self.top_k > 0 or self.entropy or self.logits or bool(self.log_probs_of)

    def union(self, other: Outputs) -> Outputs:
        """The outputs that either requests."""
        return Outputs(
            argmax=self.argmax or other.argmax,
            top_k=max(self.top_k, other.top_k),
            entropy=self.entropy or other.entropy,
            logits=self.logits or other.logits,
            log_probs_of=tuple(dict.fromkeys(self.log_probs_of + other.log_probs_of)),
            hidden=tuple(dict.fromkeys(self.hidden + other.hidden)),
        )


NOTHING = Outputs()
ARGMAX = Outputs(argmax=True)
LOGITS = Outputs(logits=True)


@dataclass(slots=True)
class Row:
    """The answer to one row's :class:`Outputs`; what was not requested is ``None``.

    Attributes:
        top_tokens: int64 ``[top_k]``, most probable first, smaller ids first on a tie.
        top_log_probs: float32 ``[top_k]``, nats.
        logits: float32 ``[vocab_size]``.
        log_probs: float32 ``[len(log_probs_of)]``, nats.
        entropy_of: computes :attr:`entropy` when it is first read: most rows of a tree are discarded unread.
        hidden: name to a vector ``[hidden_size]``, in the model's own array type.
    """

    argmax: int | None = None
    top_tokens: np.ndarray | None = None
    top_log_probs: np.ndarray | None = None
    entropy_of: Callable[[], float] | None = None
    logits: np.ndarray | None = None
    log_probs: np.ndarray | None = None
    hidden: Mapping[str, Any] = field(default_factory=dict)
    _entropy: float | None = None

    @property
    def entropy(self) -> float | None:
        """Entropy of the next-token distribution, in nats."""
        if self._entropy is None and self.entropy_of is not None:
            self._entropy = self.entropy_of()
            self.entropy_of = None  # it holds the pass's logits
        return self._entropy
