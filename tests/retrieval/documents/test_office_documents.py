"""Office files, OpenDocument, books and tables: what real writers wrote, and what was made to do harm."""

from __future__ import annotations

import io
import shutil
import time
import zipfile
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import pytest

from specrag.retrieval.documents.converters import ReadingLimits, UnreadableError
from specrag.retrieval.documents.packages import Package
from specrag.retrieval.documents.reader import Document, read_file
from specrag.retrieval.documents.tables import Row, table_parts
from tests.retrieval.sample_files import file_of, one, reason, written

SAMPLES = Path(__file__).parent / "samples"
SHEET = '<worksheet xmlns="urn:x"><sheetData>{}</sheetData></worksheet>'


def sample(name: str) -> Document:
    return one(read_file(file_of(SAMPLES / name)))


def places(document: Document) -> list[str]:
    return [part.place for part in document.parts]


def packed(entries: Mapping[str, str | bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return stream.getvalue()


def changed(name: str, entries: dict[str, str | bytes]) -> bytes:
    """A sample with other content in some of its files."""
    with zipfile.ZipFile(SAMPLES / name) as archive:
        return packed({**{entry: archive.read(entry) for entry in archive.namelist()}, **entries})


def workbook(rows: str, texts: str = "") -> bytes:
    return changed(
        "costs.xlsx",
        {
            "xl/worksheets/sheet1.xml": SHEET.format(rows),
            "xl/worksheets/sheet2.xml": SHEET.format(""),
            "xl/sharedStrings.xml": f'<sst xmlns="urn:x">{texts}</sst>',
        },
    )


# What real writers wrote


def test_xlsx() -> None:
    document = sample("costs.xlsx")
    assert document.title == "Costs of the pumps"
    assert [(part.place, part.markup, part.first) for part in document.parts] == [
        ("sheet Costs", "rows", 1),
        ("sheet Costs", "rows", 2001),  # two thousand empty rows are not kept
        ("sheet Notes", "rows", 1),
    ]
    assert document.parts[0].text.split("\n") == [
        "Costs of 2024",
        "",
        "Item; Cost; Bought; Share; Checked",
        "Item: Red pump; Cost: 1234.5; Bought: 2024-02-29; Share: 12.5%; Checked: 2024-03-01 13:45",
        "Item: Valve & seal; Cost: 0.3; Bought: 1999-12-31; Share: 100%; Checked: true",
        "Item: Total; Cost: 1234.8",  # a text in two fonts, a formula's stored value
    ]
    assert document.parts[1].text == "Cost: far below"
    assert document.parts[2].text == "Ask Ann.\nOr Bob."


def test_formula_without_a_value_is_told(tmp_path: Path) -> None:
    data = workbook(
        '<row r="1"><c r="A1" t="inlineStr"><is><t>sum</t></is></c><c r="B1"><f>1+1</f></c></row>'
    )
    read = read_file(written(tmp_path, "a.xlsx", data))
    assert one(read).parts[0].text == "sum"
    assert [entry.reason.split(";")[0] for entry in read.skipped] == ["1 formulas have no stored values"]


@pytest.mark.parametrize(
    ("cells", "text"),
    [
        ('<c t="str"><f>A1</f><v>words</v></c>', "words"),
        ('<c t="e"><v>#N/A</v></c>', "#N/A"),
        ("<c><v>1E-3</v></c>", "0.001"),
        ("<c><v>0.1</v></c><c/><c><v>-7.0</v></c>", "0.1; -7"),
        ('<c t="s"><v>0</v></c>', "Tokyo"),
    ],
)
def test_cells(tmp_path: Path, cells: str, text: str) -> None:
    texts = "<si><t>Tokyo</t><rPh><t>toukyou</t></rPh></si>"
    data = workbook(f"<row>{cells}</row>", texts)
    assert one(read_file(written(tmp_path, "a.xlsx", data))).parts[0].text == text


def test_pptx() -> None:
    document = sample("talk.pptx")
    assert document.title == "Pumps and valves"
    assert [(part.place, part.markup, part.text) for part in document.parts] == [
        ("slide 1", "markdown", "# Pumps and valves\n\nA talk"),
        ("slide 2", "markdown", "# Why red?\n\nRed < blue & cheaper\n\nIt is seen\n\nWait for laughter."),
        ("slide 3", "markdown", "| Pump | Price |\n| --- | --- |\n| Red | 7 |\n\nIn a group"),
    ]


def test_odt() -> None:
    document = sample("letter.odt")
    assert document.title == "Pumps"
    assert document.parts[0].text == (
        "# Pumps\n\nRed pumps  \nare < blue ones (since 1999).\n\n## Valves\n\n- seal\n- screw\n\nThe end"
    )


def test_ods_and_odp() -> None:
    (sheet,) = sample("costs.ods").parts
    assert (sheet.place, sheet.text) == ("sheet Costs", "Item; Cost\nItem: Pump; Cost: 1.234,50 €")
    talk = sample("talk.odp")
    assert (talk.title, places(talk)) == ("Pumps", ["slide 1", "slide 2"])
    assert talk.parts[1].text == "# Valves\n\nBlue ones"


def test_epub() -> None:
    book = sample("novel.epub")
    assert book.title == "The Pump"
    assert [(part.place, part.text) for part in book.parts] == [
        ("", "# The start\n\nIt was red.\n\n## Later\n\nIt was blue."),
        ("The start > Later", "It went on."),  # a chapter in two files
        ("", "## At night\n\nIt slept."),
        ("The end", "It stopped."),  # a chapter without a heading has its name from the contents
    ]


# Tables


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.csv", "item,cost\npump,7\nvalve,8\n", "item; cost\nitem: pump; cost: 7\nitem: valve; cost: 8"),
        ("a.csv", "item;cost\npump;7,5\n", "item; cost\nitem: pump; cost: 7,5"),
        ("a.tsv", "item\tcost\na, b\t7\n", "item; cost\nitem: a, b; cost: 7"),
        ("a.csv", 'item,note\npump,"two\nlines, ""more"""\n', 'item; note\nitem: pump; note: two lines, "more"'),
        ("a.csv", "1,2\n3,4\n", "1; 2\n3; 4"),  # no names
        ("a.csv", "pump,pump\nvalve,8\n", "pump; pump\nvalve; 8"),
        ("a.csv", "Costs,\nitem,cost\npump,7\n", "Costs\nitem; cost\nitem: pump; cost: 7"),
        ("a.csv", "item,cost\n\npump,7\n", "item; cost\n\nitem: pump; cost: 7"),  # a line a row
        ("a.csv", "item,cost\npump,7\n\nyear,sum,tax\n2024,9,1\n", "item; cost\nitem: pump; cost: 7\n\nyear; sum; tax\n"
            "year: 2024; sum: 9; tax: 1"),
        ("a.csv", "item,cost\npump,7\n\nvalve,new\nseal,old\n", "item; cost\nitem: pump; cost: 7\n\n"
            "item: valve; cost: new\nitem: seal; cost: old"),
        ("a.csv", "just words\nand more\n", "just words\nand more"),
        ("a.csv", 'a,b\nnever "closed, x\ny,"quote\n', 'a; b\na: never "closed; b: x\na: y; b: quote'),
    ],
)  # fmt: skip
def test_csv(tmp_path: Path, name: str, content: str, text: str) -> None:
    (part,) = one(read_file(written(tmp_path, name, content))).parts
    assert (part.text, part.markup, part.own_lines, part.first) == (text, "rows", True, 1)


# Made to do harm


@pytest.mark.parametrize("name", ["costs.xlsx", "talk.pptx", "letter.odt", "costs.ods", "novel.epub"])
@pytest.mark.parametrize("keep", [100, 600, 1200])
def test_cut_off_file(tmp_path: Path, name: str, keep: int) -> None:
    data = (SAMPLES / name).read_bytes()[:keep]
    assert reason(read_file(written(tmp_path, name, data))).startswith("broken ")


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("costs.xlsx", "xl/worksheets/sheet1.xml"),
        ("costs.xlsx", "xl/sharedStrings.xml"),
        ("talk.pptx", "ppt/slides/slide2.xml"),
        ("letter.odt", "content.xml"),
        ("novel.epub", "EPUB/content.opf"),
    ],
)
@pytest.mark.parametrize(
    "content",
    [
        b"\0\xff junk",
        b"<a>" * 5000,
        b"<a>" * 5000 + b"</a>" * 5000,
    ],
)
def test_harmful_xml(tmp_path: Path, name: str, entry: str, content: bytes) -> None:
    started = time.perf_counter()
    read = read_file(written(tmp_path, name, changed(name, {entry: content})))
    assert time.perf_counter() - started < 5
    assert reason(read).startswith("broken ")


def test_other_files_are_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    head = f'<!DOCTYPE a [<!ENTITY e SYSTEM "{secret.as_uri()}">]>'
    slide = "<p><cSld><spTree><sp><txBody><p><r><t>a &e; b</t></r></p></txBody></sp></spTree></cSld></p>"
    for name, data in {
        "a.xlsx": workbook('<row><c t="inlineStr"><is><t>a &e; b</t></is></c></row>'),
        "a.pptx": changed("talk.pptx", {"ppt/slides/slide1.xml": f'{head}<a xmlns="urn:x">{slide}</a>'}),
        "a.odt": changed(
            "letter.odt",
            {"content.xml": f'{head}<d xmlns="urn:t"><body><text><p>a &e; b</p></text></body></d>'},
        ),
    }.items():
        read = read_file(written(tmp_path, name, data))
        assert not any("secret" in part.text for document in read.documents for part in document.parts)


def test_entities_are_not_expanded(tmp_path: Path) -> None:
    entities = "".join(f"<!ENTITY e{n} '{f'&e{n - 1};' * 10}'>" for n in range(1, 10))
    sheet = f"<!DOCTYPE a [<!ENTITY e0 'ha'>{entities}]>" + SHEET.format(
        '<row><c t="inlineStr"><is><t>&e9;</t></is></c><c><v>7</v></c></row>'
    )
    read = read_file(written(tmp_path, "a.xlsx", changed("costs.xlsx", {"xl/worksheets/sheet1.xml": sheet})))
    assert sum(len(part.text) for document in read.documents for part in document.parts) < 100


def test_long_text_in_many_cells_ends_at_the_limit(tmp_path: Path) -> None:
    cell = '<c t="s"><v>0</v></c>'
    data = workbook(f"<row>{cell * 5000}</row>", f"<si><t>{'word ' * 20_000}</t></si>")
    started = time.perf_counter()
    read = read_file(written(tmp_path, "a.xlsx", data), ReadingLimits(characters=1_000_000))
    assert reason(read) == "its text is longer than 1,000,000 characters; split it"
    assert time.perf_counter() - started < 5


def test_long_table_ends_at_the_limit(tmp_path: Path) -> None:
    rows = (
        Row(number, {0: "item" if number == 1 else "7", 1: "word " * 1000}) for number in count(1)
    )  # no end
    with pytest.raises(UnreadableError, match="longer than 1,000,000 characters"):
        list(table_parts(rows, "", ReadingLimits(characters=1_000_000)))


@pytest.mark.parametrize("attribute", ["number-rows-repeated", "number-columns-repeated"])
def test_repeated_cells_end_at_the_limit(tmp_path: Path, attribute: str) -> None:
    cell = f'<table-cell t:{attribute}="999999999"><p>{"word " * 500}</p></table-cell>'
    table = f'<table><table-row t:{attribute}="999999999">{cell}</table-row></table>'
    body = f"<body><spreadsheet>{table}</spreadsheet></body>"
    data = changed("costs.ods", {"content.xml": f'<d xmlns="urn:t" xmlns:t="urn:t">{body}</d>'})
    read = read_file(written(tmp_path, "a.ods", data), ReadingLimits(characters=1_000_000))
    assert "longer than 1,000,000 characters" in reason(read)


def test_row_at_the_end_of_a_sheet_costs_nothing(tmp_path: Path) -> None:
    row = '<row r="1048576"><c r="XFD1048576"><v>7</v></c></row>'
    (part,) = one(read_file(written(tmp_path, "a.xlsx", workbook(row)))).parts
    assert (part.text, part.first) == ("7", 1_048_576)


def test_too_many_slides_and_chapters(tmp_path: Path) -> None:
    for name in ("talk.pptx", "talk.odp", "novel.epub"):
        shutil.copy(SAMPLES / name, tmp_path)
        assert "more than 1; split it" in reason(read_file(file_of(tmp_path / name), ReadingLimits(pages=1)))


def test_bombs(tmp_path: Path) -> None:
    bomb = changed("costs.xlsx", {"xl/worksheets/sheet2.xml": bytes(30_000_000)})
    assert "far more than a document holds" in reason(read_file(written(tmp_path, "a.xlsx", bomb)))
    many = packed({"content.xml": "<a/>"} | {f"{number}": "" for number in range(10_001)})
    assert "far more than a document holds" in reason(read_file(written(tmp_path, "a.odt", many)))
    with pytest.raises(UnreadableError, match="more than 0 MiB"):
        Package(SAMPLES / "talk.pptx", ".pptx", 1000)


def test_tree_that_would_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrag.retrieval.documents.packages._LARGEST_XML", 2**10)
    for name in ("talk.pptx", "talk.odp", "novel.epub"):
        shutil.copy(SAMPLES / name, tmp_path)
        assert "is larger than 0 MiB; split it" in reason(read_file(file_of(tmp_path / name)))


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.xlsx", packed({"a": b"b"}), "its content is a ZIP archive, not an XLSX"),
        ("a.odt", packed({"mimetype": b"x"}), "its content is a ZIP archive, not an OpenDocument"),
        ("a.epub", b"%PDF-1.4", "its content is a PDF, not an EPUB"),
        ("a.odt", changed("letter.odt", {"META-INF/manifest.xml": "<m><e:encryption-data/></m>"}),
            "encrypted OpenDocument; remove its password first"),
        ("a.epub", changed("novel.epub", {"META-INF/encryption.xml":
            '<e xmlns="urn:x"><CipherReference URI="EPUB/one.xhtml"/></e>'}),
            "locked EPUB (DRM): its chapters are encrypted"),
    ],
)  # fmt: skip
def test_files_that_are_something_else_or_locked(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    assert reason(read_file(written(tmp_path, name, data))) == said


def test_chapter_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    with zipfile.ZipFile(SAMPLES / "novel.epub") as archive:
        book = archive.read("EPUB/content.opf").decode()
    again = book.replace("</spine>", '<itemref idref="chapter_0"/>' * 1000 + "</spine>")
    assert again != book
    data = changed("novel.epub", {"EPUB/content.opf": again})
    read = one(read_file(written(tmp_path, "a.epub", data)))
    assert sum("It was red." in part.text for part in read.parts) == 1
