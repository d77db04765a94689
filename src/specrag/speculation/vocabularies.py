"""Two vocabularies for one text: what each spells, shared special tokens, and a growing text in both."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import Protocol

from specrag.errors import InputError
from specrag.models import END_TOKENS

#: Texts that a tokenizer must reproduce unchanged, by what they contain.
_PROBES = {
    "words": "Two words and a third.",
    "capital letters": "The NASA report",
    "runs of spaces": "a  b    c",
    "line breaks": "a\nb\n\n\tc",
    "digits": "In 2023: 3.14",
    "accents": "na\u00efve caf\u00e9",
    "other scripts": "\u6771\u4eac \u041c\u043e\u0441\u043a\u0432\u0430 \u0639\u0631\u0628\u064a",
    "emoji": "\U0001f5fc\U0001f642",
}
#: After one of these a text is encoded as in the middle of another: no word continues across a line break, and no
#: run of line breaks continues across a letter.
_ANCHORS = ("\n", "a")
#: Characters encoded together, if a word begins after them.
_PART = 64
#: Characters after which a text is cut even where no word begins, as in Chinese: the text stays the same, but the
#: tokens at the cut may differ from those of the whole text.
_LONGEST_PART = 256
#: Where tokens end in every common vocabulary: a space and a letter after something that is not a space. Tokenizers
#: split a text there before they merge, or (sentencepiece) have no token that spans the place.
_WORD = re.compile(r"(?<=\S) (?=[A-Za-z])")
#: Maximum number of tokens searched backwards for the beginning of the newest word.
_LONGEST_WORD = 16


class TextTokenizer(Protocol):
    """The part of a tokenizer that is needed (:class:`specrag.models.tokenizer.Tokenizer`)."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Every special token by its text."""

    @property
    def eos_tokens(self) -> frozenset[int]:
        """Every token that ends a text."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The tokens of a text; ``special`` adds those that the model expects around it."""

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for inside a text; empty for a special or unknown one."""


class InnerEncoder:
    """Encodes parts of a longer text: without a space in front, and without recognising special tokens in them.

    Args:
        tokenizer: encodes whole texts.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self.token_bytes = tokenizer.token_bytes
        self._special = frozenset(tokenizer.special_tokens.values())
        self._anchors: dict[str, list[int]] = {}  # if the tokenizer puts a space in front of a text
        if self.spelled(tokenizer.encode("a", special=False)) != b"a":
            self._anchors = {anchor: tokenizer.encode(anchor, special=False) for anchor in _ANCHORS}

    def encode(self, text: str) -> list[int]:
        """The tokens of a part of a text, as far as the vocabulary can spell it."""
        tokens = self._plain(text)
        if self._special.isdisjoint(tokens):
            return tokens
        # The text spells out a special token without being one: cut it so that no part spells it.
        cuts = [0, *(found.start() + 1 for found in self._spellings.finditer(text)), len(text)]
        parts = [text[start:end] for start, end in pairwise(cuts)]
        return [token for part in parts for token in self._plain(part)]

    def spelled(self, tokens: Sequence[int]) -> bytes:
        """What tokens stand for together."""
        return b"".join(map(self.token_bytes, tokens))

    def _plain(self, text: str) -> list[int]:
        if not text:
            return []
        for anchor, front in self._anchors.items():
            tokens = self._tokenizer.encode(anchor + text, special=False)
            if tokens[: len(front)] == front:
                return tokens[len(front) :]
        return self._tokenizer.encode(text, special=False)

    @cached_property
    def _spellings(self) -> re.Pattern[str]:
        longest_first = sorted(self._tokenizer.special_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))


class VocabularyPair:
    """The vocabularies of a target and a draft model. Holds no request state and is shared by all requests.

    A special token of the target, such as ``<|im_start|>``, maps to the draft model's special token of the same text.
    If there is none, it is left out: its text would mean nothing to a model that never saw it, unlike the words around
    it. A token that ends the draft model's text maps to the target's end token of the same text, or else to the one
    that ends a turn in the target's chat format.

    Args:
        target: the target's tokenizer.
        draft: the draft model's.

    Attributes:
        target: encodes for the target.
        draft: encodes for the draft model.
        front: what the draft model expects in front of every text, such as BOS.
        to_draft: the draft model's special token for one of the target's.
        ends: the target's end token for one of the draft model's.
    """

    def __init__(self, target: TextTokenizer, draft: TextTokenizer) -> None:
        self.target = InnerEncoder(target)
        self.draft = InnerEncoder(draft)
        self.front = _front(draft)
        theirs = target.special_tokens
        self.to_draft = {
            theirs[text]: token for text, token in draft.special_tokens.items() if text in theirs
        }
        to_target = {mine: their for their, mine in self.to_draft.items()}
        usual = _usual_end(target)
        self.ends: dict[int, int] = {}
        for token in draft.eos_tokens:
            end = to_target.get(token)
            if end not in target.eos_tokens:
                end = usual
            if end is not None:
                self.ends[token] = end


def check_alignment(target: TextTokenizer, draft: TextTokenizer) -> None:
    """Check that any text can be written in both vocabularies.

    Raises:
        InputError: one of them loses something; says which one and what it loses.
    """
    for owner, tokenizer in (("target", target), ("draft model", draft)):
        encoder = InnerEncoder(tokenizer)
        for name, text in _PROBES.items():
            found = encoder.spelled(encoder.encode(text)).decode(errors="replace")
            if found != text:
                raise InputError(
                    "draft model",
                    f"{text} becomes {found}",
                    f"the {owner}'s tokenizer loses {name}, so that texts cannot be aligned; "
                    "take models whose tokenizers keep every text",
                )


def _front(tokenizer: TextTokenizer) -> tuple[int, ...]:
    bare = tokenizer.encode("a", special=False)
    framed = tokenizer.encode("a", special=True)
    starts = range(len(framed) - len(bare) + 1)
    start = next((start for start in starts if framed[start : start + len(bare)] == bare), 0)
    return tuple(framed[:start])


def _usual_end(tokenizer: TextTokenizer) -> int | None:
    special = tokenizer.special_tokens
    named = (special[text] for text in END_TOKENS if special.get(text) in tokenizer.eos_tokens)
    return next(named, min(tokenizer.eos_tokens, default=None))


@dataclass(frozen=True, slots=True)
class _Mark:
    """The state after a settled part of the text.

    Attributes:
        read: the target's tokens read so far.
        settled: the draft model's tokens in front of the open text.
        open: the text after them.
        pending: bytes after that which do not form a character yet.
    """

    read: int
    settled: int
    open: str = ""
    pending: bytes = b""


class FollowedText:
    """The target's text in the draft model's tokens.

    The text is encoded in parts that are cut where a word begins. When the text grows, only the last part is encoded
    again, since its tokens may still change. The position of the cuts depends only on the text; after
    :meth:`truncate` everything is as if the text had never been longer. Bytes that do not form a character yet are
    held back until they do; bytes that never form one are read as U+FFFD.

    Attributes:
        tokens: the draft model's tokens for all that was read.
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
        """Read the target's tokens that were not read before; ``tokens`` are all of the session's."""
        if len(tokens) == self._read:
            return
        del self.tokens[self.settled :]
        for token in islice(tokens, self._read, None):
            self._push(token)
        self.tokens += self._pair.draft.encode(self._open)

    def truncate(self, length: int) -> None:
        """Forget everything after the first ``length`` of the target's tokens.

        What follows the last settled part is read again by the next :meth:`follow`.
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
        """The same text, to be followed independently."""
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
        # Otherwise both models put the same token in front of a text.

    def _settle(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.settled = len(self.tokens)
        self._marks.append(_Mark(self._read, self.settled, self._open, self._utf8.getstate()[0]))


def _cut(text: str) -> int:
    """Number of characters in the first part of a text that can be settled; 0 if more text must come first."""
    if len(text) <= _PART:
        return 0
    word = _WORD.search(text, _PART, _LONGEST_PART + 2)
    if word is not None:
        return word.start()
    return _LONGEST_PART if len(text) >= _LONGEST_PART + 2 else 0


class Continuation:
    """Writes the draft model's addition to a text in the target's tokens.

    The target's own tokens stay as they are. If the vocabulary would begin the newest word, extended by the added text,
    with exactly these tokens, the encoding of the whole is what the target would most likely write. If not (it
    wrote ``" hel"`` where ``" hello"`` is one token), the added text is encoded separately.

    Args:
        encoder: the target's.
        tokens: of the target's session.

    Attributes:
        pending: the target's last bytes, if they are only the beginning of a character.
    """

    def __init__(self, encoder: InnerEncoder, tokens: Sequence[int]) -> None:
        self._encoder = encoder
        word: list[int] = []
        spelled: list[bytes] = []
        for token in reversed(tokens[-_LONGEST_WORD:]):
            piece = encoder.token_bytes(token)
            if not piece:  # nothing spans a special token
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
        """Whether the added text may complete the pending character."""
        return added.startswith(self.pending) or self.pending.startswith(added)

    def tokens(self, added: bytes) -> list[int]:
        """The target's tokens for the whole characters in a text that follows the last whole character.

        Together they spell the text, or its beginning if the vocabulary cannot spell all of it. The last token may
        change when the text grows.
        """
        text = _whole_characters(added)
        data = text.encode()
        count = len(self._word)
        whole = self._encoder.encode(self._text + text)
        if whole[:count] == self._word:
            return self._spelling(whole[count:], data[len(self.pending) :])
        return [] if self.pending else self._spelling(self._encoder.encode(text), data)

    def spells(self, tokens: Sequence[int], added: bytes) -> bool:
        """Whether these tokens spell all of the added text."""
        return self.pending + self._encoder.spelled(tokens) == added

    def _spelling(self, tokens: Sequence[int], data: bytes) -> list[int]:
        """The leading tokens that spell ``data``: not all tokenizers preserve every text."""
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
