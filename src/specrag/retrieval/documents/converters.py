"""Converters from bytes to text: plain text, Markdown, HTML and PDF; and the outline of a Markdown text."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from specrag.errors import SpecragError

if TYPE_CHECKING:
    from bs4 import BeautifulSoup

Markup = Literal["markdown", "plain", "rows"]

LARGEST = 512 * 2**20
"""The most bytes of a file, and of the content of a compressed file, that are read into memory at once."""

_NOT_CONTENT = ("script", "style", "nav", "noscript", "template", "svg", "head")
_FRONT_MATTER = re.compile(r"---[ \t]*\n(.*?)\n(?:---|\.\.\.)[ \t]*(?:\n|$)", re.DOTALL)
_FRONT_TITLE = re.compile(r"^title[ \t]*:[ \t]*(['\"]?)(.+?)\1[ \t]*$", re.MULTILINE)
# PDFium's marks for a hyphen at a line end whose word continues on the next line.
_BROKEN_WORD = re.compile("[\x02\ufffe\u00ad]\n?")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
BOMS = (b"\xff\xfe", b"\xfe\xff")
# Titles that programs write into a PDF or DOCX if the author gave none.
_NO_TITLE = re.compile(
    r"(untitled|\(anonymous\)|unspecified|(word|powerpoint) (document|presentation)|microsoft (word|powerpoint|excel).*"
    r"|(document|slide|presentation)\s*\d*"
    r"|.*\.(docx?|dvi|tex|indd|rtf|odt|pptx?|html?|pdf|txt|qxd))?",
    re.IGNORECASE,
)


class UnreadableError(SpecragError):
    """A file cannot be converted to text; the message is the reason, as a sentence fragment."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a document's text.

    Args:
        text: the text; lines end with a line feed, and there is no NUL and no half surrogate pair.
        place: where in the document it is, such as ``page 3``; empty if it is the whole document.
        markup: how to read the text; ``rows`` means rows of a table, one per line.
        own_lines: its lines are those of the file, so line numbers are places in the file.
        first: the number of its first line.
    """

    text: str
    place: str = ""
    markup: Markup = "plain"
    own_lines: bool = False
    first: int = 1


@dataclass(frozen=True, slots=True)
class ReadingLimits:
    """Limits beyond which a document counts as unreadable; 14 KB from a stranger can contain 2,000 pages.

    Attributes:
        pages: the most pages of a PDF, slides of a presentation or chapters of a book.
        characters: the most characters of its text.
    """

    pages: int = sys.maxsize
    characters: int = sys.maxsize


UNLIMITED = ReadingLimits()


@dataclass(frozen=True, slots=True)
class Converted:
    """A file's text.

    Args:
        title: the document's own title, or empty.
        parts: one part, or one per page, slide, sheet or chapter.
        missing: what could not be read, as a sentence fragment; empty if nothing is missing.
        metadata: fields that filters can use.
    """

    title: str
    parts: tuple[Part, ...]
    missing: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


def clean(text: str) -> str:
    """Normalise line ends to line feeds; replace what databases cannot store (NUL, half surrogate pairs) by U+FFFD."""
    return _UNSTORABLE.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))


def decode(data: bytes) -> str:
    """Decode bytes: UTF-8, UTF-16 with a byte order mark, else the encoding that charset-normalizer finds likely.

    If only a few bytes are not UTF-8, these become U+FFFD and the others are kept.

    Raises:
        UnreadableError: the bytes are not text.
    """
    if data.startswith(BOMS):
        try:
            return clean(data.decode("utf-16"))
        except UnicodeDecodeError:
            raise UnreadableError("broken UTF-16 text") from None
    if b"\0" in data:
        raise UnreadableError("binary content, no text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = _decode_other(data)
    start = text[:65536]
    if len(_CONTROL.findall(start)) * 50 > len(start):
        raise UnreadableError("binary content, no text")
    return clean(text)


def _decode_other(data: bytes) -> str:
    repaired = data.decode("utf-8", "replace")
    broken = repaired.count("\ufffd")
    beyond_ascii = len(repaired) - len(repaired.encode("ascii", "ignore"))
    if broken * 10 <= beyond_ascii:
        return repaired
    from charset_normalizer import from_bytes

    best = from_bytes(data).best()
    if best is None:
        raise UnreadableError("text in an unknown encoding, or binary content; convert it to UTF-8")
    return str(best)


def convert_text(data: bytes) -> Converted:
    """Convert plain text."""
    return Converted("", (Part(decode(data), own_lines=True),))


def convert_markdown(data: bytes) -> Converted:
    """Convert Markdown; the title is that of the front matter, or the first heading."""
    text = decode(data)
    front = _FRONT_MATTER.match(text)
    title = _FRONT_TITLE.search(front[1]) if front else None
    return Converted(
        " ".join(title[2].split()) if title else first_heading(text),
        (Part(text, markup="markdown", own_lines=True),),
    )


def convert_html(data: bytes) -> Converted:
    """Convert HTML, without scripts, styles and navigation; the title is ``<title>``, or the first heading."""
    soup = _soup(decode_html(data))
    title = clean(" ".join(soup.title.get_text().split())) if soup.title else ""
    part = _soup_part(soup)
    return Converted(title or first_heading(part.text), (part,))


def html_part(html: str) -> Part:
    """The text of HTML as Markdown."""
    return _soup_part(_soup(html))


def decode_html(data: bytes) -> str:
    """Decode HTML as UTF-8 if possible, else in the encoding that the page declares, else in a likely one."""
    from bs4.dammit import EncodingDetector

    if b"\0" not in data:
        try:
            return clean(data.decode("utf-8-sig"))
        except UnicodeDecodeError:
            pass
        declared = EncodingDetector.find_declared_encoding(data, is_html=True)
        try:
            return clean(data.decode(declared or ""))
        except (UnicodeDecodeError, LookupError):
            pass
    return decode(data)


def _soup(html: str) -> BeautifulSoup:
    from bs4 import BeautifulSoup, UnusualUsageWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusualUsageWarning)  # a page that looks like XML or a file name
        return BeautifulSoup(html, "lxml")


def _soup_part(soup: BeautifulSoup) -> Part:
    from markdownify import MarkdownConverter

    for element in soup(_NOT_CONTENT):
        element.decompose()
    for image in soup("img"):
        image.replace_with(str(image.get("alt") or ""))
    convert = MarkdownConverter(
        heading_style="ATX", bullets="-", strip=["a"], escape_asterisks=False, escape_underscores=False
    )
    try:
        return Part(clean(convert.convert_soup(soup)).strip(), markup="markdown")
    except RecursionError:  # hundreds of nested elements: the text without its structure
        return Part(clean(soup.get_text("\n", strip=True)))


def convert_pdf(data: bytes, limits: ReadingLimits = UNLIMITED) -> Converted:
    """Convert PDF with PDFium, one part per page. PDFium supports only one thread at a time.

    Raises:
        UnreadableError: the file is encrypted or broken, contains no text, or exceeds the limits.
    """
    import pypdfium2

    def work() -> Converted:
        try:
            document = pypdfium2.PdfDocument(data)
        except pypdfium2.PdfiumError as error:
            if "password" in str(error).lower():
                raise UnreadableError("encrypted PDF; remove its password first") from None
            raise
        try:
            title = given_title(document.get_metadata_dict().get("Title", ""))
            pages = _page_texts(document, limits)
        finally:
            document.close()
        parts = tuple(
            Part(text, f"page {number}") for number, text in enumerate(pages, 1) if text and text.strip()
        )
        if not parts:
            raise UnreadableError("PDF without text: no text; run OCR first")
        lost = [number for number, text in enumerate(pages, 1) if text is None]
        return Converted(title, parts, _lost_pages(lost, len(pages)))

    return guard("PDF", work)


def _page_texts(document: Any, limits: ReadingLimits) -> list[str | None]:
    check_pages(len(document), limits)
    pages: list[str | None] = []
    characters = 0
    for index in range(len(document)):
        text = _page_text(document, index)
        characters += len(text or "")
        check_characters(characters, limits)
        pages.append(text)
    return pages


def check_characters(count: int, limits: ReadingLimits) -> None:
    """Refuse a document with too much text.

    Raises:
        UnreadableError: it has more characters than the limit, or than ``LARGEST``.
    """
    most = min(limits.characters, LARGEST)
    if count > most:
        raise UnreadableError(f"its text is longer than {most:,} characters; split it")


def check_pages(count: int, limits: ReadingLimits, name: str = "pages") -> None:
    """Refuse a document with too many pages, slides or chapters.

    Raises:
        UnreadableError: it has more of them than the limit.
    """
    if count > limits.pages:
        raise UnreadableError(f"it has {count:,} {name}, more than {limits.pages:,}; split it")


def _page_text(document: Any, index: int) -> str | None:
    """The page's text, empty for a blank page; ``None`` if the page has content but no readable text."""
    import pypdfium2

    try:
        page = document[index]
        text = page.get_textpage().get_text_range()
        if not text.strip():
            return None if next(page.get_objects(max_depth=2), None) is not None else ""
    except pypdfium2.PdfiumError:
        return None
    return clean(_BROKEN_WORD.sub("", text.replace("\r\n", "\n")))


def _lost_pages(lost: list[int], pages: int) -> str:
    if not lost:
        return ""
    shown = ", ".join(map(str, lost[:10])) + (", …" if len(lost) > 10 else "")
    return f"{len(lost)} of {pages} pages hold no readable text (page {shown}); run OCR if they should"


def guard(kind: str, work: Callable[[], Converted]) -> Converted:
    """Run a converter on untrusted bytes; any exception means a broken file."""
    try:
        return work()
    except UnreadableError:
        raise
    except Exception as error:
        raise UnreadableError(f"broken {kind}: {type(error).__name__}: {error}") from error


def given_title(title: str) -> str:
    """The title from a file's properties; empty if a program, not the author, has put it there."""
    title = clean(" ".join(title.split()))
    return "" if _NO_TITLE.fullmatch(title) else title


def first_heading(text: str) -> str:
    """The name of the first heading that has one; empty without one."""
    return next((heading.path[-1] for heading in outline(text, markdown=True).headings if heading.path), "")


_ATX = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))??(?:[ \t]+#+)?[ \t]*$")
_SETEXT = re.compile(r" {0,3}(=+|-{2,})[ \t]*$")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)$")
_NO_PARAGRAPH = re.compile(r"(?: {4}|\t| {0,3}(?:[#>|*+-]|\d+[.)]))")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_MARKS = re.compile(r"`|(?<![\w\\])\*+(?=\S)|(?<=[^\s\\])\*+(?!\w)|\\(?=[^\w\s])")
_WRAPPED = re.compile(r".{35}[^\W_][,;-]?[ \t]*$")  # long and ends with a word: code rarely does both
_LONGEST_NAME = 80  # characters; a heading is shown in citations


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading in a text.

    Args:
        start: index of its first character.
        end: index after its last line.
        path: the names of the headings above it and its own name, outermost first.
    """

    start: int
    end: int
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outline:
    """The headings in order, and the text with wrapped lines joined.

    ``flowing`` is as long as the text: line ends inside sentences are replaced by spaces, so that a splitter that
    prefers line ends to sentence ends does not cut there.
    """

    headings: tuple[Heading, ...]
    flowing: str


def outline(text: str, *, markdown: bool) -> Outline:
    """Find the headings (ATX and underlined, none inside fenced code) and the wrapped lines of a text.

    A line counts as wrapped if it is long and ends with a word, and the next one begins with a lower-case letter. A
    plain text has no headings and no fenced code.
    """
    headings: list[Heading] = []
    names: list[tuple[int, str]] = []  # level and name of the headings open at this point
    flowing: list[str] = []
    fence = ""
    previous, start = "", 0  # the paragraph line above, or nothing
    for line in _lines(text):
        bare = line.rstrip("\n")
        if fence:
            fence = "" if _closes(fence, bare) else fence
            flowing.append(line)
            previous, start = "", start + len(line)
            continue
        level, name = 0, ""
        if markdown:
            fence = _opened_fence(bare)
            level, name = (0, "") if fence else _heading(bare, previous)
        if level:
            while names and names[-1][0] >= level:
                names.pop()
            names.append((level, _plain(name)))
            path = tuple(name for _, name in names if name)
            above = 0 if _ATX.match(bare) else len(previous) + 1  # an underlined name
            headings.append(Heading(start - above, start + len(line), path))
        if _WRAPPED.search(previous) and bare[:1].islower() and not level:
            flowing[-1] = flowing[-1][:-1] + " "
        flowing.append(line)
        previous = "" if level or fence or not bare.strip() else bare
        start += len(line)
    return Outline(tuple(headings), "".join(flowing))


def _opened_fence(line: str) -> str:
    """The mark that must close the fenced code that a line opens; empty if it opens none."""
    mark = _FENCE.match(line)
    return mark[1] if mark and not (mark[1][0] == "`" and "`" in mark[2]) else ""


def _closes(fence: str, line: str) -> bool:
    mark = _FENCE.match(line)
    return mark is not None and mark[1].startswith(fence) and not mark[2].strip()


def _heading(line: str, previous: str) -> tuple[int, str]:
    """Level and name of the heading that a line is or underlines; level 0 if it does neither."""
    if heading := _ATX.match(line):
        return len(heading[1]), heading[2] or ""
    if previous and _SETEXT.match(line) and not _NO_PARAGRAPH.match(previous):
        return (1 if "=" in line else 2), previous
    return 0, ""


def _lines(text: str) -> list[str]:
    """Lines that end only at line feeds; ``str.splitlines`` also splits at form feeds and other characters."""
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _plain(name: str) -> str:
    """A heading without Markdown marks, on one line, shortened for display."""
    name = " ".join(_MARKS.sub("", _LINK.sub(r"\1", name)).split())
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
