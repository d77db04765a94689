"""Cut documents into chunks of limited length, at headings and sentences where possible."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from specrag.errors import InputError
from specrag.retrieval.documents.converters import Heading, Outline, Part, outline
from specrag.retrieval.documents.reader import Document

if TYPE_CHECKING:
    from semantic_text_splitter import MarkdownSplitter, TextSplitter
    from tokenizers import Tokenizer

_FEWEST_TOKENS = 16
# A splitter's time grows with the square of a stretch without a border, so it gets blocks of limited size.
_BLOCK = 50  # characters per token of a chunk
_BLOCK_ENDS = ("\n#", "\n\n", "\n", ". ", " ")  # best first
# A tokenizer may turn a word of any length into one "unknown" token, so the number of characters is limited as well.
_CHARACTERS_A_TOKEN = 32
# The ends of sentences: Latin, Chinese and Japanese marks with closing quotes and brackets, and line ends.
_SENTENCE = re.compile(
    r"[.!?\u2026][\"'\u201d\u2019\u00bb)\]]*\s+|[\u3002\uff01\uff1f][\"'\u201d\u2019\u300d\u300f\uff09]*\s*|\n\s*"
)
_WORD = re.compile(r"\s+")
_LETTER = re.compile(r"[^\W_]")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A verbatim stretch of a document, without surrounding white space.

    Args:
        text: at most ``max_tokens`` tokens; its beginning may repeat the end of the chunk before.
        title: the document's title.
        place: the part's place, such as ``page 3``, followed by the headings above the chunk's first sentence, such as
            ``Install > Linux`` without the document's title, or else by the lines of the file or rows of the table,
            such as ``lines 10-24``; empty if there is none of these.
    """

    text: str
    title: str
    place: str


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    end: int


@lru_cache(maxsize=4)
def _load_tokenizer(path: str, mtime_ns: int, size: int) -> Tokenizer:  # noqa: ARG001 - another file has another
    """A tokenizer, cached because loading it takes longer than cutting a document."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing narrower
        remedy = f"it is no tokenizer.json ({' '.join(str(error).split())[:100]})"
        raise InputError("tokenizer_file", path, remedy) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class Chunker:
    """Cuts documents into chunks of limited length.

    Cuts are made at headings (Markdown only), paragraphs, lines, sentences or words, in this order of preference, as
    found by semantic-text-splitter; a line end inside a sentence counts as a space. A chunk that follows another one
    under the same heading begins with up to ``overlap`` tokens of that one, starting at the beginning of a sentence if
    possible, else of a word; rows of a table are not repeated. Pages and records are never joined.

    Args:
        tokenizer_file: the encoder's ``tokenizer.json``; its own truncation and padding are not used.
        max_tokens: the most tokens in a chunk, not counting special tokens and the title.
        overlap: the most tokens that a chunk repeats; 0 for none.

    Raises:
        InputError: ``max_tokens`` is below 16, ``overlap`` is negative or more than half of it, or there is no
            such file.
    """

    def __init__(self, tokenizer_file: Path, max_tokens: int = 200, overlap: int = 32) -> None:
        if max_tokens < _FEWEST_TOKENS:
            raise InputError("max_tokens", max_tokens, f"give at least {_FEWEST_TOKENS}")
        if not 0 <= overlap <= max_tokens // 2:
            raise InputError("overlap", overlap, f"give 0 to {max_tokens // 2}, half of max_tokens")
        if not tokenizer_file.is_file():
            raise InputError("tokenizer_file", str(tokenizer_file), "there is no such file")
        self.tokenizer_file = tokenizer_file
        self.max_tokens = max_tokens
        self.overlap = overlap

    def chunk(self, document: Document) -> list[Chunk]:
        """The document's chunks in order. Every character that is not white space is in at least one of them."""
        return [chunk for part in document.parts for chunk in self._part(part, document.title)]

    def count(self, text: str) -> int:
        """Number of tokens of a text, without special tokens."""
        return self._counts([text])[0]

    def _part(self, part: Part, title: str) -> Iterator[Chunk]:
        text = part.text
        if not text.strip():
            return
        fits = self._fits(text)
        if fits and part.place and part.markup == "plain" and not part.own_lines:
            # shortcut for the common case of a short record
            yield Chunk(text.strip(), title, part.place)
            return
        # A row of a table never continues on the next line.
        is_table = part.markup == "rows"
        shape = Outline((), text) if is_table else outline(text, markdown=part.markup == "markdown")
        place = _Places(part, title, shape.headings)
        for span in [_Span(0, len(text))] if fits else self._spans(part, shape):
            chunk = text[span.start : span.end]
            if stripped := chunk.strip():
                start = span.start + len(chunk) - len(chunk.lstrip())
                yield Chunk(stripped, title, place.of(start, start + len(stripped)))

    def _spans(self, part: Part, shape: Outline) -> Iterator[_Span]:
        text = part.text
        found = list(self._cuts(shape.flowing, part.markup == "markdown"))
        cuts = _without_scraps(text, found, shape.headings)
        spans = [_Span(start, end) for start, end in pairwise(cuts)]
        longer = spans if part.markup == "rows" else self._overlapping(text, spans, shape.headings)
        counts = self._counts([text[span.start : span.end].strip() for span in longer])
        fits = [
            self._fits(text[span.start : span.end], count) for span, count in zip(longer, counts, strict=True)
        ]
        for index, span in enumerate(spans):
            following = index + 1
            if following < len(spans) and fits[following] and longer[following].start == longer[index].start:
                continue  # the next chunk repeats all of it
            if fits[index]:
                yield longer[index]
            else:  # a tokenizer whose counts do not add up, or an endless word
                yield from self._halves(text, span)

    def _cuts(self, text: str, markdown: bool) -> Iterator[int]:
        """Positions of the cuts, ascending, from 0 to the length of the text."""
        splitter = self._markdown_splitter if markdown else self._text_splitter
        starts = list(_block_starts(text, _BLOCK * self.max_tokens))
        blocks = [text[start:end] for start, end in pairwise([*starts, len(text)])]
        for start, found in zip(starts, splitter.chunk_all_indices(blocks), strict=True):
            yield from (start + offset for offset, _ in found)
        yield len(text)

    def _overlapping(self, text: str, spans: list[_Span], headings: tuple[Heading, ...]) -> list[_Span]:
        """The spans, each starting earlier, but within the span before it and under the same heading."""
        if not self.overlap:
            return spans
        heads = [heading.start for heading in headings]
        windows: list[_Span] = []
        for before, span in zip([_Span(0, 0), *spans], spans, strict=False):
            head = heads[index - 1] if (index := bisect_right(heads, span.start)) else 0
            low = max(before.start, head, span.start - self.overlap * _CHARACTERS_A_TOKEN)
            windows.append(_Span(min(low, span.start), span.start))
        encodings = self._tokenizer.encode_batch(
            [text[window.start : window.end] for window in windows], add_special_tokens=False
        )
        starts = []
        for window, encoding in zip(windows, encodings, strict=True):
            offsets = encoding.offsets
            first = offsets[-self.overlap][0] if len(offsets) > self.overlap else 0
            starts.append(window.start + _good_start(text[window.start : window.end], first))
        return [_Span(start, span.end) for start, span in zip(starts, spans, strict=True)]

    def _halves(self, text: str, span: _Span) -> Iterator[_Span]:
        """The span in pieces that fit, cut recursively at a word boundary near the middle."""
        piece = text[span.start : span.end]
        if len(piece) < 2 or self._fits(piece):
            yield span
            return
        half = len(piece) // 2
        word = _WORD.search(piece, half, half + 100)
        middle = span.start + (word.end() if word and word.end() < len(piece) else half)
        yield from self._halves(text, _Span(span.start, middle))
        yield from self._halves(text, _Span(middle, span.end))

    def _fits(self, text: str, tokens: int | None = None) -> bool:
        """Whether a text fits into a chunk; its tokens are counted unless given."""
        text = text.strip()
        if len(text) > self.max_tokens * _CHARACTERS_A_TOKEN:
            return False
        return (self.count(text) if tokens is None else tokens) <= self.max_tokens

    def _counts(self, texts: list[str]) -> list[int]:
        return [
            len(found.ids) for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        try:
            status = self.tokenizer_file.stat()
        except OSError as error:
            reason = error.strerror or error
            raise InputError(
                "tokenizer_file", str(self.tokenizer_file), f"it cannot be read ({reason})"
            ) from None
        return _load_tokenizer(str(self.tokenizer_file), status.st_mtime_ns, status.st_size)

    @cached_property
    def _text_splitter(self) -> TextSplitter:
        from semantic_text_splitter import TextSplitter

        new = self.max_tokens - self.overlap
        return TextSplitter.from_huggingface_tokenizer(self._tokenizer, new, trim=False)

    @cached_property
    def _markdown_splitter(self) -> MarkdownSplitter:
        from semantic_text_splitter import MarkdownSplitter

        new = self.max_tokens - self.overlap
        return MarkdownSplitter.from_huggingface_tokenizer(self._tokenizer, new, trim=False)


class _Places:
    """Names the place of a chunk in its part."""

    def __init__(self, part: Part, title: str, headings: tuple[Heading, ...]) -> None:
        self.part = part
        self.title = title
        self.headings = headings
        self.heads = [heading.start for heading in headings]

    def of(self, start: int, end: int) -> str:
        """The place of the characters from ``start``, which is not white space, to ``end``."""
        if path := self._path(start, end):
            return " > ".join((self.part.place, *path) if self.part.place else path)
        lines = self._lines(start, end) if self.part.own_lines else ""
        return ", ".join(filter(None, (self.part.place, lines)))

    def _path(self, start: int, end: int) -> tuple[str, ...]:
        """The headings above the first text that is not itself a heading."""
        index = bisect_right(self.heads, start) - 1
        if index < 0:
            return ()
        while (
            index + 1 < len(self.headings)
            and start < self.headings[index].end
            and self.headings[index + 1].start < end
            and not self.part.text[self.headings[index].end : self.headings[index + 1].start].strip()
        ):
            index += 1
            start = self.headings[index].start
        path = self.headings[index].path
        return path[1:] if path and path[0] == self.title else path

    def _lines(self, start: int, end: int) -> str:
        first = bisect_left(self._line_ends, start) + self.part.first
        last = bisect_left(self._line_ends, end) + self.part.first
        name = "row" if self.part.markup == "rows" else "line"
        return f"{name}s {first}-{last}" if first < last else f"{name} {first}"

    @cached_property
    def _line_ends(self) -> list[int]:
        return [match.start() for match in re.finditer("\n", self.part.text)]


def _without_scraps(text: str, cuts: list[int], headings: tuple[Heading, ...]) -> list[int]:
    """The cuts without those that would leave only headings, marks and space, which belong to what follows."""
    heads = [heading.start for heading in headings]
    kept = [cuts[0]]
    for cut in cuts[1:]:
        inside = headings[bisect_left(heads, kept[-1]) : bisect_left(heads, cut)]
        borders = [kept[-1], *(index for heading in inside for index in (heading.start, heading.end)), cut]
        between = (text[borders[index] : borders[index + 1]] for index in range(0, len(borders), 2))
        if any(_LETTER.search(stretch) for stretch in between):
            kept.append(cut)
    if kept[-1] != cuts[-1]:  # nothing follows: join to what comes before, unless it has words of its own
        if len(kept) > 1 and not _LETTER.search(text, kept[-1]):
            kept.pop()
        kept.append(cuts[-1])
    return kept


def _block_starts(text: str, size: int) -> Iterator[int]:
    """The starts of blocks: 0, and then the best border in the second half of each block."""
    start = 0
    while start < len(text):
        yield start
        start = _block_end(text, start, size)


def _block_end(text: str, start: int, size: int) -> int:
    end = start + size
    if end >= len(text):
        return len(text)
    for border in _BLOCK_ENDS:
        found = text.rfind(border, start + size // 2, end)
        if found >= 0:
            return found + (1 if border == "\n#" else len(border))
    return end


def _good_start(window: str, first: int) -> int:
    """The first beginning of a sentence from ``first`` on, else of a word, else ``first``."""
    last = len(window.rstrip())
    if first == 0:
        return 0
    for border in (_SENTENCE, _WORD):
        for match in border.finditer(window, max(first - 1, 0)):
            if first <= match.end() < last:
                return match.end()
    return first
