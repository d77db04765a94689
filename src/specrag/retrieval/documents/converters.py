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
"""Bytes of a file, and of what a compressed one holds, that are read into memory at once."""

_NOT_CONTENT = ("script", "style", "nav", "noscript", "template", "svg", "head")
_FRONT_MATTER = re.compile(r"---[ \t]*\n(.*?)\n(?:---|\.\.\.)[ \t]*(?:\n|$)", re.DOTALL)
_FRONT_TITLE = re.compile(r"^title[ \t]*:[ \t]*(['\"]?)(.+?)\1[ \t]*$", re.MULTILINE)
# PDFium's marks for a hyphen at a line end, whose word goes on in the next line.
_BROKEN_WORD = re.compile("[\x02\ufffe\u00ad]\n?")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
BOMS = (b"\xff\xfe", b"\xfe\xff")
# What programs write into the title of a PDF or DOCX when its author gave none.
_NO_TITLE = re.compile(
    r"(untitled|\(anonymous\)|unspecified|(word|powerpoint) (document|presentation)|microsoft (word|powerpoint|excel).*"
    r"|(document|slide|presentation)\s*\d*"
    r"|.*\.(docx?|dvi|tex|indd|rtf|odt|pptx?|html?|pdf|txt|qxd))?",
    re.IGNORECASE,
)


class UnreadableError(SpecragError):
    """A file cannot be converted to text; the message is the reason, a sentence fragment."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a document's text.

    Args:
        text: lines end with a line feed; no NUL and no half surrogate pair.
        place: where it stands, such as ``page 3``; empty if it is the whole document.
        markup: how to read the text; ``rows`` are those of a table, one a line.
        own_lines: its lines are those of the file, so that line numbers are places in the file.
        first: the number of its first line.
    """

    text: str
    place: str = ""
    markup: Markup = "plain"
    own_lines: bool = False
    first: int = 1


@dataclass(frozen=True, slots=True)
class ReadingLimits:
    """Limits beyond which a document counts as unreadable; 14 KB from a stranger can hold 2,000 pages.

    Attributes:
        pages: of a PDF; slides of a presentation, chapters of a book.
        characters: of its text.
    """

    pages: int = sys.maxsize
    characters: int = sys.maxsize


UNLIMITED = ReadingLimits()


@dataclass(frozen=True, slots=True)
class Converted:
    """A file's text.

    Args:
        title: the document's own, or empty.
        parts: one, or one a page, slide, sheet or chapter.
        missing: what could not be read, as a sentence fragment; empty if nothing is missing.
        metadata: what filters can ask for.
    """

    title: str
    parts: tuple[Part, ...]
    missing: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


def clean(text: str) -> str:
    """Line feeds as line ends; U+FFFD for what no database stores (NUL, half surrogate pairs)."""
    return _UNSTORABLE.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))


def decode(data: bytes) -> str:
    """Text from bytes: UTF-8, UTF-16 with its mark, else the encoding that charset-normalizer finds likely.

    Bytes that are UTF-8 but for a few keep the good ones and get U+FFFD for the rest.

    Raises:
        UnreadableError: the bytes are no text.
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
    """Plain text."""
    return Converted("", (Part(decode(data), own_lines=True),))


def convert_markdown(data: bytes) -> Converted:
    """Markdown; the title is that of the front matter, or the first heading."""
    text = decode(data)
    front = _FRONT_MATTER.match(text)
    title = _FRONT_TITLE.search(front[1]) if front else None
    return Converted(
        " ".join(title[2].split()) if title else first_heading(text),
        (Part(text, markup="markdown", own_lines=True),),
    )


def convert_html(data: bytes) -> Converted:
    """HTML without scripts, styles and navigation; the title is ``<title>``, or the first heading."""
    soup = _soup(decode_html(data))
    title = clean(" ".join(soup.title.get_text().split())) if soup.title else ""
    part = _soup_part(soup)
    return Converted(title or first_heading(part.text), (part,))


def html_part(html: str) -> Part:
    """The text of HTML as Markdown."""
    return _soup_part(_soup(html))


def decode_html(data: bytes) -> str:
    """UTF-8 if it is, else the encoding that the page declares, else a likely one."""
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
        warnings.simplefilter("ignore", UnusualUsageWarning)  # a page that looks like XML or a file's name
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
    """PDF by PDFium, a part a page. PDFium serves one thread at a time.

    Raises:
        UnreadableError: the file is encrypted or broken, holds no text, or more of it than may be read.
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
        UnreadableError: it has more characters than may be read, or ``LARGEST`` of them.
    """
    most = min(limits.characters, LARGEST)
    if count > most:
        raise UnreadableError(f"its text is longer than {most:,} characters; split it")


def check_pages(count: int, limits: ReadingLimits, name: str = "pages") -> None:
    """Refuse a document with too many pages, slides or chapters.

    Raises:
        UnreadableError: it has more of them than may be read.
    """
    if count > limits.pages:
        raise UnreadableError(f"it has {count:,} {name}, more than {limits.pages:,}; split it")


def _page_text(document: Any, index: int) -> str | None:
    """The page's text, empty for a blank page; ``None`` if there is something on it but no text to read."""
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
    """Run a converter on untrusted bytes; whatever it raises means a broken file."""
    try:
        return work()
    except UnreadableError:
        raise
    except Exception as error:
        raise UnreadableError(f"broken {kind}: {type(error).__name__}: {error}") from error


def given_title(title: str) -> str:
    """A title among a file's properties, unless a program has put it there; then it is empty."""
    title = clean(" ".join(title.split()))
    return "" if _NO_TITLE.fullmatch(title) else title


def first_heading(text: str) -> str:
    """Name of the first named heading; empty without one."""
    return next((heading.path[-1] for heading in outline(text, markdown=True).headings if heading.path), "")


_ATX = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))??(?:[ \t]+#+)?[ \t]*$")
_SETEXT = re.compile(r" {0,3}(=+|-{2,})[ \t]*$")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)$")
_NO_PARAGRAPH = re.compile(r"(?: {4}|\t| {0,3}(?:[#>|*+-]|\d+[.)]))")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_MARKS = re.compile(r"`|(?<![\w\\])\*+(?=\S)|(?<=[^\s\\])\*+(?!\w)|\\(?=[^\w\s])")
_WRAPPED = re.compile(r".{35}[^\W_][,;-]?[ \t]*$")  # long, and ends with a word: code seldom does both
_LONGEST_NAME = 80  # characters; a heading is shown in citations


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading in a text.

    Args:
        start: index of its first character.
        end: index behind its last line.
        path: the names of the headings above it and its own, outermost first.
    """

    start: int
    end: int
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outline:
    """The headings in order, and the text with wrapped lines joined.

    ``flowing`` has the length of the text: a line end inside a sentence has become a space, so that a splitter
    which prefers line ends to sentence ends does not cut there.
    """

    headings: tuple[Heading, ...]
    flowing: str


def outline(text: str, *, markdown: bool) -> Outline:
    """Read the headings (ATX and underlined, none inside fenced code) and the wrapped lines of a text.

    A line end is taken as wrapping if the line is long and ends with a word, and the next one begins with a
    lower-case letter. A plain text has no headings and no fenced code.
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
    """The mark that has to close the fenced code that a line opens; empty if it opens none."""
    mark = _FENCE.match(line)
    return mark[1] if mark and not (mark[1][0] == "`" and "`" in mark[2]) else ""


def _closes(fence: str, line: str) -> bool:
    mark = _FENCE.match(line)
    return mark is not None and mark[1].startswith(fence) and not mark[2].strip()


def _heading(line: str, previous: str) -> tuple[int, str]:
    """Level and name of the heading that a line is, or that it underlines; level 0 if it is none."""
    if heading := _ATX.match(line):
        return len(heading[1]), heading[2] or ""
    if previous and _SETEXT.match(line) and not _NO_PARAGRAPH.match(previous):
        return (1 if "=" in line else 2), previous
    return 0, ""


def _lines(text: str) -> list[str]:
    """Lines that end at a line feed only: ``str.splitlines`` also breaks at form feeds and others."""
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _plain(name: str) -> str:
    """A heading without its Markdown marks, on one line, not too long to show."""
    name = " ".join(_MARKS.sub("", _LINK.sub(r"\1", name)).split())
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
