"""Toy tokenizers and a toy model that recites, for the tests of drafting across vocabularies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from specrag.models import catalog
from specrag.models.tokenizer import Tokenizer
from specrag.models.toy import ToyModel
from specrag.speculation.vocabularies import InnerEncoder, TextTokenizer

#: Real tokenizers; the last is of a large model, which not every machine has.
NAMES = ("smollm2-135m", "gemma-3-270m", "qwen2.5-coder-1.5b")
#: Every pair of two of them, the target first.
PAIRS = [(target, draft) for target in NAMES for draft in NAMES if target != draft]

_loaded: dict[str, Tokenizer] = {}


def real_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a model of the catalog; skips the test where it is not on this machine."""
    if name not in _loaded:
        pulled = {status.name for status in catalog.list_models() if status.pulled}
        if name != "smollm2-135m" and name not in pulled:
            pytest.skip(f"{name} is not on this machine")
        _loaded[name] = Tokenizer(catalog.resolve(name))
    return _loaded[name]


class Spelling:
    """A tokenizer of a few words: the longest that fits comes next, and what none fits is lost.

    Args:
        words: what each token stands for; nothing for a special one.
        special: the special tokens by their text.
        ends: those that end a text.
        front: put in front of a text with ``special=True``.
    """

    def __init__(
        self,
        words: Sequence[bytes],
        special: Mapping[str, int] | None = None,
        ends: Sequence[int] = (),
        front: Sequence[int] = (),
    ) -> None:
        self._words = list(words)
        self._front = list(front)
        self.special_tokens = dict(special or {})
        self.eos_tokens = frozenset(ends)
        self.encoded = 0  # characters, for tests of what it costs

    def encode(self, text: str, *, special: bool) -> list[int]:
        self.encoded += len(text)
        data = text.encode()
        tokens = list(self._front) if special else []
        place = 0
        while place < len(data):
            fitting = [
                token for token, word in enumerate(self._words) if word and data.startswith(word, place)
            ]
            if fitting:
                tokens.append(max(fitting, key=lambda token: len(self._words[token])))
            place += len(self._words[tokens[-1]]) if fitting else 1
        return tokens

    def token_bytes(self, token: int) -> bytes:
        return self._words[token] if token < len(self._words) else b""


class Reciting(ToyModel):
    """Knows one text and writes it in the tokens of its vocabulary, from wherever it is given the beginning.

    Args:
        tokenizer: its vocabulary.
        text: what it knows.
        end: the token that it writes behind the text.
        width: columns of its logits.
        context_length: largest number of tokens in a sequence.
    """

    def __init__(
        self, tokenizer: TextTokenizer, text: str, end: int, width: int, context_length: int = 4096
    ) -> None:
        super().__init__(vocab_size=1, order=1, context_length=context_length)
        self.table = np.zeros((1, width), np.float32)
        self._encoder = InnerEncoder(tokenizer)
        self._data = text.encode()
        self._end = end
        self._usual: dict[int, int] = {}  # the next token by the bytes written so far
        place = 0
        for token in self._encoder.encode(text):
            self._usual[place] = token
            place += len(self._encoder.token_bytes(token))

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        known = self._encoder.spelled(tokens)
        row = np.zeros(self.vocab_size, np.float32)
        row[self._next(len(known)) if self._data.startswith(known) else self._end] = 20.0
        return row

    def _next(self, place: int) -> int:
        if place in self._usual or place >= len(self._data):
            return self._usual.get(place, self._end)
        # Elsewhere the rest of the text is encoded anew, from the beginning of the character.
        start = place
        while self._data[start] & 0xC0 == 0x80:
            start -= 1
        for token in self._encoder.encode(self._data[start : start + 60].decode(errors="ignore")):
            if start == place:
                return token
            start += len(self._encoder.token_bytes(token))
        return self._end
