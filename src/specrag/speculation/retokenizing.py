"""One text in two vocabularies while it grows: the draft model reads it, and what it adds goes back."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from specrag.speculation.vocabularies import InnerEncoder, VocabularyPair

#: Characters that are encoded together, if a word begins behind them.
_PART = 64
#: Characters after which a text is cut where no word begins, as in Chinese: the same text, but the tokens at the cut
#: may be others than of the whole.
_LONGEST_PART = 256
#: Where tokens end in every common vocabulary: a space and a letter behind something that is no space. Tokenizers
#: split a text there before they merge, or (sentencepiece) hold no token that reaches across.
_WORD = re.compile(r"(?<=\S) (?=[A-Za-z])")
#: Tokens that are looked back at for the beginning of the newest word.
_LONGEST_WORD = 16


@dataclass(frozen=True, slots=True)
class _Mark:
    """The state behind a part of the text that is settled.

    Attributes:
        read: the target's tokens read by then.
        settled: the draft model's tokens in front of the open text.
        open: the text behind them.
        pending: bytes behind that which are no character yet.
    """

    read: int
    settled: int
    open: str = ""
    pending: bytes = b""


class FollowedText:
    """The target's text in the draft model's tokens.

    The text is encoded in parts, which are cut where a word begins, so that only the last part is encoded anew
    when the text grows: its tokens may still change. Where the cuts lie depends on the text alone; after
    :meth:`truncate` everything is as if the text had never been longer. Bytes that are no character yet are
    left out until they are one; bytes that never become one are read as U+FFFD.

    Attributes:
        tokens: the draft model's tokens of all that was read.
        settled: how many of them cannot change when the text grows.
    """

    def __init__(self, pair: VocabularyPair) -> None:
        self._pair = pair
        self.tokens = list(pair.front)
        self.settled = len(self.tokens)
        self._marks = [_Mark(0, self.settled)]
        self._read = 0
        self._open = ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def follow(self, tokens: Sequence[int]) -> None:
        """Read the target's tokens, all of the session's, beyond those that were read before."""
        if len(tokens) == self._read:
            return
        del self.tokens[self.settled :]
        for token in islice(tokens, self._read, None):
            self._push(token)
        self.tokens += self._pair.draft.encode(self._open)

    def truncate(self, length: int) -> None:
        """Forget everything behind the first ``length`` of the target's tokens.

        What stands behind the last settled part is read again with the next :meth:`follow`.
        """
        if length >= self._read:
            return
        while self._marks[-1].read > length:
            self._marks.pop()
        mark = self._marks[-1]
        self._read, self.settled, self._open = mark.read, mark.settled, mark.open
        self._utf8.setstate((mark.pending, 0))
        del self.tokens[self.settled :]
        self.tokens += self._pair.draft.encode(self._open)

    def fork(self) -> FollowedText:
        """The same text, to be followed elsewhere."""
        other = FollowedText(self._pair)
        other.tokens, other.settled = list(self.tokens), self.settled
        other._marks = list(self._marks)
        other._read, other._open = self._read, self._open
        other._utf8.setstate(self._utf8.getstate())
        return other

    def _push(self, token: int) -> None:
        self._read += 1
        special = self._pair.to_draft.get(token)
        if special is None:
            self._open += self._utf8.decode(self._pair.target.token_bytes(token))
            while cut := _cut(self._open):
                part, self._open = self._open[:cut], self._open[cut:]
                self._settle(self._pair.draft.encode(part))
            return
        part, self._open = self._open + self._utf8.decode(b"", final=True), ""
        if part or not self.tokens or self.tokens[-1] != special or len(self.tokens) > len(self._pair.front):
            self._settle([*self._pair.draft.encode(part), special])
        # Else both models put the same token in front of a text.

    def _settle(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.settled = len(self.tokens)
        self._marks.append(_Mark(self._read, self.settled, self._open, self._utf8.getstate()[0]))


def _cut(text: str) -> int:
    """Characters of the first part of a text that can be settled; 0 if more text must come first."""
    if len(text) <= _PART:
        return 0
    word = _WORD.search(text, _PART, _LONGEST_PART + 2)
    if word is not None:
        return word.start()
    return _LONGEST_PART if len(text) >= _LONGEST_PART + 2 else 0


class Continuation:
    """Writes what the draft model adds to a text in the target's tokens.

    The target's own tokens stay as they are. If they are how the vocabulary begins the newest word together with
    the added text, the target's tokens of the whole are what it would most likely write. If they are not (it
    wrote ``" hel"`` where ``" hello"`` is one token), it must go on with tokens of the added text alone.

    Args:
        encoder: the target's.
        tokens: of the target's session.

    Attributes:
        pending: the target's last bytes, if they are the beginning of a character only.
    """

    def __init__(self, encoder: InnerEncoder, tokens: Sequence[int]) -> None:
        self._encoder = encoder
        word: list[int] = []
        spelled: list[bytes] = []
        for token in reversed(tokens[-_LONGEST_WORD:]):
            piece = encoder.token_bytes(token)
            if not piece:  # nothing reaches across a special token
                break
            word.append(token)
            spelled.append(piece)
            if piece[:1] == b" " and piece[1:2].isalpha():
                break
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._word = word[::-1]
        self._text = utf8.decode(b"".join(reversed(spelled)))
        self.pending = utf8.getstate()[0]

    def fits(self, added: bytes) -> bool:
        """Whether the added text may complete the character that is pending."""
        return added.startswith(self.pending) or self.pending.startswith(added)

    def tokens(self, added: bytes) -> list[int]:
        """The target's tokens of the whole characters of a text that follows the last whole character.

        Together they spell the text, or a first part of it where the vocabulary cannot spell all. The last one
        may be another when the text goes on.
        """
        text = _whole_characters(added)
        data = text.encode()
        count = len(self._word)
        whole = self._encoder.encode(self._text + text)
        if whole[:count] == self._word:
            return self._spelling(whole[count:], data[len(self.pending) :])
        return [] if self.pending else self._spelling(self._encoder.encode(text), data)

    def spells(self, tokens: Sequence[int], added: bytes) -> bool:
        """Whether these tokens are all of the added text."""
        return self.pending + self._encoder.spelled(tokens) == added

    def _spelling(self, tokens: Sequence[int], data: bytes) -> list[int]:
        """The first of the tokens, as far as they spell ``data``: not all tokenizers keep every text."""
        place = 0
        for count, token in enumerate(tokens):
            piece = self._encoder.token_bytes(token)
            if not piece or not data.startswith(piece, place):
                return list(tokens[:count])
            place += len(piece)
        return list(tokens)


def _whole_characters(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()
