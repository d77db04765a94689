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
from specrag.models.chat import END_TOKENS

#: Texts that a tokenizer must give back unchanged, by what they hold.
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
#: Behind one of these a text is encoded as in the middle of another: no word goes on behind a line break, and no
#: run of line breaks behind a letter.
_ANCHORS = ("\n", "a")
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
        """What a token stands for inside a text; nothing for a special or unknown one."""


class InnerEncoder:
    """Encodes parts of a longer text: no space is put in front, and no special token is read out of them.

    Args:
        tokenizer: encodes whole texts.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self.token_bytes = tokenizer.token_bytes
        self._special = frozenset(tokenizer.special_tokens.values())
        self._anchors: dict[str, list[int]] = {}  # where a space would be put in front of a text
        if self.spelled(tokenizer.encode("a", special=False)) != b"a":
            self._anchors = {anchor: tokenizer.encode(anchor, special=False) for anchor in _ANCHORS}

    def encode(self, text: str) -> list[int]:
        """The tokens of a part of a text, as far as the vocabulary can spell it."""
        tokens = self._plain(text)
        if self._special.isdisjoint(tokens):
            return tokens
        # The text spells a special token without being one: no part of it does.
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
    """The vocabularies of a target and a draft model. Holds nothing of a request and is shared by all.

    A special token of the target is the draft model's of the same text, such as ``<|im_start|>``. Where there is
    none it is left out: its text would be a riddle to a model that never saw it, while the words around it are
    not. A token that ends the draft model's text is the target's end token of the same text, else the one that
    ends a turn in the target's chat format.

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
        InputError: one of them loses something; says which and what.
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
