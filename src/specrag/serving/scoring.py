"""Log-probabilities of a text that is given: ``echo`` with ``logprobs``, by which programs score texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specrag.engine.outputs import NOTHING, Outputs
from specrag.engine.passes import Coroutine, Emit
from specrag.engine.session import Session
from specrag.methods.generation import Generation, Timing, Usage
from specrag.speculation.decode import TARGET, DecodedToken
from specrag.speculation.target import Alternative

if TYPE_CHECKING:
    from specrag.language_model import LanguageModel

# Every row of such a pass has a whole vocabulary of logits.
_CHUNK = 64


@dataclass(frozen=True, slots=True)
class PromptScored:
    """An event: what the model thinks of the prompt.

    Attributes:
        tokens: of the prompt; the first has no log-probability.
    """

    tokens: tuple[DecodedToken, ...]


def scoring(
    llm: LanguageModel, tokens: Sequence[int], top: int, then: Callable[[], Coroutine[Generation]] | None
) -> Coroutine[Generation]:
    """Score a prompt, emit :class:`PromptScored`, then generate.

    Args:
        top: how many alternatives to tell beside each token.
        then: generates; by default nothing is generated.
    """
    session = Session(llm.model)
    try:
        wanted = [Outputs(top_k=top, log_probs_of=(int(token),)) for token in tokens[1:]]
        scored = [DecodedToken(int(tokens[0]), TARGET)]
        if wanted:
            # The last token is not fed: what follows it is not asked for here.
            rows = yield from session.extend(tokens, wanted or NOTHING, _CHUNK)
            for token, row in zip(tokens[1:], rows, strict=True):
                assert row.log_probs is not None
                others: tuple[Alternative, ...] = ()
                if top and row.top_tokens is not None and row.top_log_probs is not None:
                    pairs = zip(row.top_tokens, row.top_log_probs, strict=True)
                    others = tuple(Alternative(int(other), float(log_prob)) for other, log_prob in pairs)
                scored.append(DecodedToken(int(token), TARGET, float(row.log_probs[0]), others))
    finally:
        session.close()
    yield Emit(PromptScored(tuple(scored)))
    if then is None:
        return Generation("", (), "length", Usage(len(tokens), 0, 0, 0, {}, {}), Timing(0.0, 0.0))
    return (yield from then())
