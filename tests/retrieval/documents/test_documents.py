"""Files to documents: every format from a real file, with its title, places and metadata."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import docx
import pytest

from specrag.retrieval.documents.reader import read_file
from tests.retrieval.sample_files import file_of, one, pdf, reason, word_file, written


def test_plain_text(tmp_path: Path) -> None:
    read = read_file(written(tmp_path, "pump notes.txt", "One.\r\nTwo.\rThree.\n"))
    document = one(read)
    assert (document.source, document.title) == ("pump notes.txt", "pump notes")
    (part,) = document.parts
    assert part.text == "One.\nTwo.\nThree.\n"
    assert (part.markup, part.place, part.own_lines) == ("plain", "", True)
    assert len(read.sha256) == 64


@pytest.mark.parametrize("name", ["pump.py", "README", "pump.log", "pump.rs"])
def test_other_text_is_plain_text(tmp_path: Path, name: str) -> None:
    assert one(read_file(written(tmp_path, name, "x = 1\n"))).parts[0].markup == "plain"


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("Intro\n\n# The *big* `pump`\n\ntext", "The big pump"),
        ("The big pump\n===\n\ntext", "The big pump"),
        ("---\nauthor: A\ntitle: 'The big pump'\n---\n# Other\n", "The big pump"),
        ("```\n# no heading\n```\n## snake_case pump\n", "snake_case pump"),
        ("no heading", "manual.v2"),
    ],
)
def test_markdown_title(tmp_path: Path, text: str, title: str) -> None:
    document = one(read_file(written(tmp_path, "manual.v2.md", text)))
    assert document.title == title
    assert document.parts[0].text == text
    assert document.parts[0].markup == "markdown"


def test_html(tmp_path: Path) -> None:
    html = """<!doctype html><html><head><title> Pump &amp;
        valve </title><style>p {color: red}</style></head><body><nav>menu</nav><h1>Install</h1>
        <p>Turn the <a href="http://x.test/long?q=1">valve</a> <img src="data:AAAA" alt="drawing"> of snake_case.</p>
        <table><tr><th>part</th><th>size</th></tr><tr><td>valve</td><td>7</td></tr></table>
        <script>evil()</script></body></html>"""
    document = one(read_file(written(tmp_path, "pump.html", html)))
    (part,) = document.parts
    assert document.title == "Pump & valve"
    assert part.text.startswith("# Install")
    assert "Turn the valve drawing of snake_case." in part.text
    assert "| valve | 7 |" in part.text
    for gone in ("menu", "color", "evil", "http", "AAAA", "Pump"):
        assert gone not in part.text
    assert not part.own_lines


def test_html_in_its_declared_encoding(tmp_path: Path) -> None:
    page = "<meta charset=iso-8859-2><h1>Łódź</h1><p>zażółć gęślą jaźń</p>"
    document = one(read_file(written(tmp_path, "a.htm", page.encode("iso-8859-2"))))
    assert document.title == "Łódź"
    assert "zażółć gęślą jaźń" in document.parts[0].text


def test_html_nested_beyond_the_converter_keeps_its_text(tmp_path: Path) -> None:
    document = one(read_file(written(tmp_path, "deep.html", "<div>" * 5000 + "the deep text")))
    assert "the deep text" in document.parts[0].text


def test_html_that_looks_like_a_file_name_or_xml(tmp_path: Path) -> None:
    assert one(read_file(written(tmp_path, "a.html", "index.html"))).parts[0].text == "index.html"
    xml = '<?xml version="1.0" encoding="utf-8"?><html xmlns="x"><body><p>tęxt</p></body></html>'
    assert "tęxt" in one(read_file(written(tmp_path, "b.xhtml", xml))).parts[0].text


def test_pdf_by_page(tmp_path: Path) -> None:
    content = pdf("The pump is\nred and heavy-\nweight.", "The valve is blue.", title="Pump manual")
    document = one(read_file(written(tmp_path, "x.pdf", content)))
    assert document.title == "Pump manual"
    assert [part.place for part in document.parts] == ["page 1", "page 2"]
    assert document.parts[0].text.startswith("The pump is\nred and heavy")
    assert document.parts[0].text.isprintable() or "\n" in document.parts[0].text
    assert document.parts[1].text.strip() == "The valve is blue."


@pytest.mark.parametrize("title", [None, "untitled", "Microsoft Word - manual.doc", "manual.tex"])
def test_pdf_title_that_a_program_wrote_is_none(tmp_path: Path, title: str | None) -> None:
    assert one(read_file(written(tmp_path, "pump.pdf", pdf("text", title=title)))).title == "pump"


def test_docx(tmp_path: Path) -> None:
    document = docx.Document()
    document.add_heading("Pump manual", 0)
    document.add_heading("Install", 1)
    document.add_paragraph("Turn the snake_case valve.")
    document.add_heading("Linux", 2)
    document.add_paragraph("More text.")
    document.save(str(tmp_path / "a.docx"))
    read = one(read_file(file_of(tmp_path / "a.docx")))
    assert read.title == "Pump manual"
    assert read.parts[0].markup == "markdown"
    assert read.parts[0].text.split("\n\n") == [
        "# Pump manual",
        "# Install",
        "Turn the snake_case valve.",
        "## Linux",
        "More text.",
    ]


@pytest.mark.parametrize(("given", "title"), [("Pumps", "Pumps"), ("", "a"), ("Word Document", "a")])
def test_docx_title_from_its_properties(tmp_path: Path, given: str, title: str) -> None:
    assert one(read_file(written(tmp_path, "a.docx", word_file(given)))).title == title


ROWS = [
    '{"title": "Pump", "text": "Red.", "year": 2020, "tags": ["a", "b"], "new": true, "deep": {"x": 1}}',
    "",
    "{broken",
    '{"title": "Valve"}',
    '{"text": 7}',
    '{"text": "  "}',
    "[1]",
    '{"text": "Blue.", "score": NaN}',
    "[" * 100_000,
    '{"text": "Green.", "half": "\\ud83d", "huge": 1e999}',
]


@pytest.mark.parametrize("packed", [False, True])
def test_json_lines_keep_the_good_rows_and_name_the_bad_ones(tmp_path: Path, packed: bool) -> None:
    data = "\n".join(ROWS).encode() + b'\n{"text": "\xff"}\n'
    name = "rows.jsonl.gz" if packed else "rows.jsonl"
    read = read_file(written(tmp_path, name, gzip.compress(data) if packed else data))
    first, second = read.documents
    assert (first.source, first.title, first.parts[0].place) == (name, "Pump", "line 1")
    assert first.metadata == {"year": 2020, "tags": ["a", "b"], "new": True}
    assert (second.title, second.parts[0].text, second.parts[0].place) == ("", "Green.", "line 10")
    assert second.metadata == {"half": "\ufffd"}
    reasons = [entry.reason.split(":")[0] for entry in read.skipped]
    assert reasons == [f"line {number}" for number in (3, 4, 5, 6, 7, 8, 9, 11)]
    assert "no field text" in read.skipped[1].reason
    assert "UTF-8" in read.skipped[-1].reason


def test_json_lines_without_a_good_row_are_one_entry(tmp_path: Path) -> None:
    read = read_file(written(tmp_path, "rows.jsonl", b"\x00\xfe junk\n" * 1000))
    assert "none of its 1000 rows" in reason(read)
    assert "no records" in reason(read_file(written(tmp_path, "blank.jsonl", "\n\n")))


def test_json_array_of_objects_with_texts_is_records(tmp_path: Path) -> None:
    rows = [
        {"title": "Pump", "text": "Red.", "year": 2020},
        {"text": "Blue."},
        {"text": " "},
        {"title": "None"},
    ]
    read = read_file(written(tmp_path, "a.json", json.dumps(rows)))
    found = [(document.title, document.parts[0].text, document.parts[0].place) for document in read.documents]
    assert found == [("Pump", "Red.", "entry 1"), ("", "Blue.", "entry 2")]
    assert read.documents[0].metadata == {"year": 2020}
    assert [entry.reason for entry in read.skipped] == [
        "entry 3: empty: its text has no words",
        "entry 4: no field text",
    ]


@pytest.mark.parametrize(
    "content",
    [
        '{"Pump": "Red.", "Valve": {"text": "Blue."}}',
        '{"title": "Pump", "text": "Red."}',
        '[{"title": "Pump", "text": "Red."}, "Blue."]',
        '["Red.", "Blue."]',
        '[{"name": "pump"}, {"name": "valve"}]',
        '// with a comment\n{"pump": 1}',
        "7",
    ],
)
def test_other_json_is_text_as_it_is(tmp_path: Path, content: str) -> None:
    read = read_file(written(tmp_path, "settings.json", content))
    (part,) = one(read).parts
    assert (one(read).title, part.text, part.own_lines) == ("settings", content, True)
    assert not read.skipped


@pytest.mark.parametrize("content", ["{}", "[]", "null", '""', '[{"text": ""}]'])
def test_json_without_texts(tmp_path: Path, content: str) -> None:
    reason(read_file(written(tmp_path, "a.json", content)))


def _notebook() -> dict[str, object]:
    printed = [f"line {number}\n" for number in range(40)]
    picture = {"image/png": "iVBORw0KGgo" * 100, "text/plain": ["<Figure>"]}
    error = {"output_type": "error", "ename": "PumpError", "evalue": "dry", "traceback": ["\x1b[31m"]}
    return {
        "nbformat": 4,
        "metadata": {"language_info": {"name": "julia"}},
        "cells": [
            {"cell_type": "markdown", "source": ["# Pump\n", "It is *red*."]},
            {
                "cell_type": "code",
                "source": "turn(valve)",
                "outputs": [
                    {"output_type": "stream", "text": printed},
                    {"output_type": "display_data", "data": picture},
                ],
            },
            {"cell_type": "code", "source": 's = """\n```\n"""', "outputs": []},
            {"cell_type": "code", "source": "pump()", "outputs": [error]},
            {"cell_type": "raw", "source": "The end."},
        ],
    }


def test_notebook(tmp_path: Path) -> None:
    document = one(read_file(written(tmp_path, "a.ipynb", json.dumps(_notebook()))))
    (part,) = document.parts
    assert (document.title, part.markup) == ("Pump", "markdown")
    first, code, printed, quoted, failing, error, end = part.text.split("\n\n")
    assert first == "# Pump\nIt is *red*."
    assert code == "```julia\nturn(valve)\n```"
    assert printed.split("\n")[:2] == ["```", "line 0"]
    assert printed.endswith("line 9\n…\n```")  # the rest is left out
    assert quoted.startswith("````julia\n")  # its fence is longer than the one inside
    assert (failing, error) == ("```julia\npump()\n```", "```\nPumpError: dry\n```")
    assert end == "The end."


def test_notebook_of_format_3(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "heading", "level": 2, "source": "Pumps"},
        {"cell_type": "code", "input": ["x = 1"], "outputs": [{"output_type": "pyout", "text": ["1"]}]},
    ]
    old = {"nbformat": 3, "metadata": {}, "worksheets": [{"cells": cells}]}
    document = one(read_file(written(tmp_path, "a.ipynb", json.dumps(old))))
    assert document.title == "Pumps"
    assert document.parts[0].text == "## Pumps\n\n```python\nx = 1\n```\n\n```\n1\n```"


@pytest.mark.parametrize(
    "content", ["{", "7", "{}", '{"cells": 7, "metadata": {}}', '{"cells": [1], "metadata": {}}']
)
def test_broken_notebook(tmp_path: Path, content: str) -> None:
    assert reason(read_file(written(tmp_path, "a.ipynb", content))).startswith("broken notebook: ")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "cp1252", "shift_jis"])
def test_text_in_other_encodings(tmp_path: Path, encoding: str) -> None:
    text = "Die große Pumpe von Köln läuft über Nacht, außer am Sonntag. Müller prüft sie täglich. " * 5
    if encoding == "shift_jis":
        text = "東京のポンプは赤いです。大阪のバルブは青いです。" * 10
    assert one(read_file(written(tmp_path, "a.txt", text.encode(encoding)))).parts[0].text == text


def test_a_few_broken_bytes_do_not_turn_utf8_into_something_else(tmp_path: Path) -> None:
    text = "Grüße aus Köln. " * 20
    document = one(read_file(written(tmp_path, "a.txt", text.encode() + "ü".encode()[:1])))
    assert document.parts[0].text == text + "\ufffd"
