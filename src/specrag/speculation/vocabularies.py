"""Two vocabularies for one text: what each spells, and which special tokens they share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
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


class TextTokenizer(Protocol):
    """What is needed of a tokenizer (:class:`specrag.models.tokenizer.Tokenizer`)."""

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
    """Make sure that any text can be written in both vocabularies.

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
