"""Log-probabilities in the two forms of OpenAI's API, and those of a given text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specrag.engine import Coroutine, Emit, Outputs, Row, Session
from specrag.models import Tokenizer
from specrag.request import Result, Timing, Usage
from specrag.speculation import TARGET, DecodedToken, alternatives

if TYPE_CHECKING:
    from specrag.language_model import LanguageModel

#: The log-probability that JSON shows for a probability of 0.
_LEAST = -9999.0


class TokenNames:
    """Tokens as clients see them.

    Args:
        tokenizer: the model's; ``None`` for one that returns texts and no tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        named = {} if tokenizer is None else tokenizer.special_tokens
        self._special = {token: text for text, token in named.items()}

    def bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; for a special token, its name."""
        if token in self._special:
            return self._special[token].encode()
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token)

    def text(self, token: int) -> str:
        """The same as characters; parts of a character are escaped."""
        data = self.bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def shown(self, tokens: Iterable[DecodedToken], ends: frozenset[int]) -> list[DecodedToken]:
        """The tokens that are part of the text: all but the one that ended it."""
        return [token for token in tokens if token.token not in ends]


def chat_log_probs(names: TokenNames, tokens: Sequence[DecodedToken]) -> dict[str, Any]:
    """``logprobs`` of a chat completion's choice."""

    def described(token: int, log_prob: float | None) -> dict[str, Any]:
        data = names.bytes(token)
        return {"token": names.text(token), "logprob": _number(log_prob), "bytes": list(data)}

    content = [
        {
            **described(token.token, token.log_prob),
            "top_logprobs": [described(other.token, other.log_prob) for other in token.alternatives],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_log_probs(
    names: TokenNames, tokens: Sequence[DecodedToken], offset: int, *, from_start: bool = False
) -> dict[str, Any]:
    """``logprobs`` of a completion's choice.

    Args:
        offset: characters before the first token.
        from_start: nothing precedes the first token, which therefore has no probability.
    """
    texts = [names.text(token.token) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    top = [
        {names.text(other.token): _number(other.log_prob) for other in token.alternatives} for token in tokens
    ]
    numbers: list[float | None] = [_number(token.log_prob) for token in tokens]
    first = {"token_logprobs": numbers, "top_logprobs": [*top]}
    if from_start and tokens:
        first = {"token_logprobs": [None, *numbers[1:]], "top_logprobs": [None, *top[1:]]}
    return {"tokens": texts, **first, "text_offset": offsets}


def _number(log_prob: float | None) -> float:
    return _LEAST if log_prob is None else max(log_prob, _LEAST)


# Rows of one scoring pass, each of which computes logits over the whole vocabulary.
_CHUNK = 64


@dataclass(frozen=True, slots=True)
class PromptScored:
    """An event: the model's scores of the prompt.

    A long prompt has so many alternatives that the garbage collector takes a tenth of a second to visit or free them as
    objects, so they stay in arrays until they are written.

    Attributes:
        tokens: the prompt's.
        rows: those of the tokens after the first, which has no probability.
    """

    tokens: Sequence[int]
    rows: Sequence[Row]

    def __len__(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens)

    def described(self, start: int, stop: int) -> list[DecodedToken]:
        """Some of the tokens with their log-probabilities and alternatives."""
        return [self._described(position) for position in range(start, min(stop, len(self)))]

    def _described(self, position: int) -> DecodedToken:
        token = int(self.tokens[position])
        if not position:
            return DecodedToken(token, TARGET)
        row = self.rows[position - 1]
        assert row.log_probs is not None
        return DecodedToken(token, TARGET, float(row.log_probs[0]), alternatives(row))


def scoring(
    llm: LanguageModel, tokens: Sequence[int], top: int, then: Callable[[], Coroutine[Result]] | None
) -> Coroutine[Result]:
    """Score a prompt, emit :class:`PromptScored`, then generate.

    Args:
        top: how many alternatives to report for each token.
        then: generates; ``None`` generates nothing.
    """
    session = Session(llm.model)
    try:
        wanted = [Outputs(top_k=top, log_probs_of=(int(token),)) for token in tokens[1:]]
        # The last token is not fed: what follows it is not needed here.
        rows = (yield from session.extend(tokens, wanted, _CHUNK)) if wanted else []
    finally:
        session.close()
    yield Emit(PromptScored(tokens, rows))
    if then is None:
        return Result("", (), "length", Usage(len(tokens), 0, 0, 0, {}, {}), Timing(0.0, 0.0))
    return (yield from then())
