"""A static corpus: any number of texts, built once, mapped from disk and shared by all requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from specrag.errors import InputError
from specrag.speculation.suffix import corpus_files as files
from specrag.speculation.suffix import corpus_loops as loops
from specrag.speculation.suffix.corpus_files import CorpusManifest
from specrag.speculation.suffix.index import (
    BORDER,
    MAX_LENGTH,
    Match,
    Tokens,
    checked_tokens,
    last_tokens,
    require_not_negative,
    until_border,
)

_MOST_POSITIONS = 2**31 - 1


def build_corpus(texts: Iterable[Tokens], folder: str | Path, *, tokenizer: str) -> CorpusManifest:
    """Index the tokens of ``texts`` and write the result to ``folder``, all or nothing.

    An older corpus in ``folder`` is replaced at the end; one that is open stays usable. A token takes about 30 bytes of
    memory during the build and 8 bytes on disk.

    Args:
        texts: token ids of each text; read once.
        tokenizer: identifies the tokenizer that made them (``Tokenizer.fingerprint``).

    Raises:
        InputError: a text holds something other than token ids; no text has two tokens; all together have more
            than 2^31; ``folder`` holds other files or cannot be written. Nothing is left behind.
    """
    folder = Path(folder)
    if not tokenizer:
        raise InputError("tokenizer", tokenizer, "give the fingerprint of the tokenizer that made the tokens")
    files.require_target(folder)
    border = np.array([BORDER], dtype=np.int32)
    parts = [border]
    starts: list[int] = []
    position = 1
    longest = 0
    for number, text in enumerate(texts):
        tokens = checked_tokens(f"texts[{number}]", text).astype(np.int32)
        starts.append(position)
        position += len(tokens) + 1
        longest = max(longest, len(tokens))
        if position > _MOST_POSITIONS:
            raise InputError("texts", position, f"a corpus holds {_MOST_POSITIONS} tokens: build several")
        parts += [tokens, border]
    if longest < 2:
        raise InputError("texts", len(starts), "give at least one text of two tokens or more")
    whole = np.concatenate(parts)
    del parts
    with files.publishing(folder) as partial:
        manifest = CorpusManifest(
            tokenizer=tokenizer,
            texts=len(starts),
            tokens=len(whole) - len(starts) - 1,
            checksums={
                files.TOKENS: files.write_array(partial, files.TOKENS, whole),
                files.TEXTS: files.write_array(partial, files.TEXTS, np.array(starts, dtype=np.int64)),
                files.POSITIONS: files.write_array(
                    partial, files.POSITIONS, loops.continued_positions(whole)
                ),
            },
        )
        files.write_manifest(partial, manifest)
    return manifest


@dataclass(frozen=True, slots=True)
class CorpusArrays:
    """The arrays that are mapped from disk.

    Attributes:
        tokens: ``[positions]``, a negative number at each border.
        positions: ``[suffixes]``, the suffix array.
        texts: ``[texts]``, where each begins.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    texts: NDArray[np.int64]


class SuffixCorpus:
    """The suffixes of many texts, looked up in a suffix array. Immutable; any number of threads may use it.

    Positions count the tokens of all texts in turn, plus a border before, between and after them. Looking up a
    suffix of m tokens among n costs at most O(m log n) steps, and k occurrences O(k), however many there are.
    """

    def __init__(self, folder: Path, manifest: CorpusManifest, arrays: CorpusArrays) -> None:
        self.folder = folder
        self.manifest = manifest
        self._opened: CorpusArrays | None = arrays

    @classmethod
    def open(cls, folder: str | Path, *, tokenizer: str | None = None) -> SuffixCorpus:
        """Map the corpus in ``folder``.

        Args:
            tokenizer: fingerprint of the tokenizer whose tokens will be looked up; without it the user of the corpus
                must check it (:meth:`require_tokenizer`), as a decoder does.

        Raises:
            InputError: there is no corpus, it is damaged, or another tokenizer made its tokens.
        """
        folder = Path(folder)
        manifest = files.read_manifest(folder)
        if tokenizer is not None:
            _require_tokenizer(folder, manifest, tokenizer)
        tokens = files.map_array(folder, files.TOKENS, manifest)
        positions = files.map_array(folder, files.POSITIONS, manifest)
        texts = files.map_array(folder, files.TEXTS, manifest)
        return cls(folder, manifest, CorpusArrays(tokens, positions, texts))

    def __enter__(self) -> SuffixCorpus:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the files; arrays handed out before are copies and stay valid. Everything else fails from now on."""
        self._opened = None

    def __len__(self) -> int:
        return len(self._arrays.tokens)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """All tokens, ``[positions]``, with a negative number at each border; mapped from disk, read-only."""
        return self._arrays.tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; file pages, which the system keeps in memory as far as they are used."""
        arrays = self._arrays
        return arrays.tokens.nbytes + arrays.positions.nbytes + arrays.texts.nbytes

    def require_tokenizer(self, fingerprint: str) -> None:
        """Make sure that the corpus holds the tokens of a tokenizer.

        Raises:
            InputError: another tokenizer made them.
        """
        _require_tokenizer(self.folder, self.manifest, fingerprint)

    def match(self, tail: Tokens, max_length: int = MAX_LENGTH) -> Match:
        """The longest suffix of ``tail``, of at most ``max_length`` tokens, that occurs with a token after it.

        Raises:
            InputError: ``max_length`` is negative, or the corpus is closed.
        """
        arrays = self._arrays
        new = last_tokens(tail, max_length)
        length, rank = loops.longest(arrays.tokens, arrays.positions, new)
        if length == 0:
            return Match(0, -1, 0)
        low, high = loops.interval(arrays.tokens, arrays.positions, new, length, rank)
        return Match(length, low, high - low)

    def occurrences(self, match: Match, limit: int) -> NDArray[np.int64]:
        """At most ``limit`` distinct ends of ``match``, ``[ends]``, each with a token of its text after it.

        If there are more, those at evenly spaced ranks are taken, ordered by what stands before the match: a
        deterministic sample in which a continuation is about as frequent as in the corpus.

        Raises:
            InputError: ``limit`` is negative, ``match`` is of another index, or the corpus is closed.
        """
        require_not_negative("limit", limit)
        positions = self._arrays.positions
        if match.length == 0:
            return np.empty(0, dtype=np.int64)
        if match.count is None or not 0 <= match.place <= len(positions) - match.count:
            raise InputError("match", match, "give a match of this corpus")
        ends = np.empty(min(limit, match.count), dtype=np.int64)
        loops.spread_ends(positions, match.place, match.count, ends)
        return ends

    def continuation(self, end: int, count: int) -> NDArray[np.int32]:
        """A copy of at most ``count`` tokens starting at ``end``, ``[tokens]``, cut at the end of their text."""
        return until_border(self._arrays.tokens, end, count)

    def text(self, end: int) -> int:
        """The number, from 0, of the text that contains the token at ``end``."""
        return int(np.searchsorted(self._arrays.texts, end, side="right")) - 1

    @property
    def _arrays(self) -> CorpusArrays:
        opened = self._opened
        if opened is None:
            raise InputError("corpus", str(self.folder), "it is closed; open it again")
        return opened


def _require_tokenizer(folder: Path, manifest: CorpusManifest, fingerprint: str) -> None:
    if manifest.tokenizer != fingerprint:
        remedy = f"its tokens are of tokenizer {manifest.tokenizer!r}, not {fingerprint!r}: build one for this model"
        raise InputError("corpus", str(folder), remedy)
