"""E-mail: the text that was meant, its head as metadata, and what is attached to it."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from email.message import EmailMessage
from pathlib import Path

import pytest

from specrag.retrieval.documents.converters import ReadingLimits
from specrag.retrieval.documents.reader import read_file
from tests.retrieval.sample_files import one, pdf, reason, word_file, written

SAMPLES = Path(__file__).parent / "samples"
WORD = "vnd.openxmlformats-officedocument.wordprocessingml.document"


def mail(text: str = "It is red.", **head: str) -> EmailMessage:
    message = EmailMessage()
    given: Mapping[str, str] = {
        "Subject": "The pump",
        "From": "Ann Ö <ann@x.test>",
        "To": "bob@x.test",
        **head,
    }
    for name, value in given.items():
        message[name] = value
    message.set_content(text)
    return message


def test_text_head_and_metadata(tmp_path: Path) -> None:
    message = mail(Cc="Carl <carl@x.test>, d@x.test", Date="Thu, 29 Feb 2024 23:30:00 -0200")
    document = one(read_file(written(tmp_path, "a.eml", message.as_bytes())))
    assert document.title == "The pump"
    (part,) = document.parts
    assert (part.markup, part.place) == ("plain", "")
    assert part.text == (
        "From: Ann Ö <ann@x.test>\nTo: bob@x.test\nCc: Carl <carl@x.test>, d@x.test\n"
        "Date: Thu, 29 Feb 2024 23:30:00 -0200\n\nIt is red."
    )
    assert document.metadata == {
        "from": "ann@x.test",
        "to": ["bob@x.test", "carl@x.test", "d@x.test"],
        "date": "2024-03-01T01:30:00Z",
    }


def test_of_plain_text_and_html_the_former_counts(tmp_path: Path) -> None:
    message = mail()
    message.add_alternative("<p>It is <b>blue</b>.</p>", subtype="html")
    assert (
        one(read_file(written(tmp_path, "a.eml", message.as_bytes())))
        .parts[0]
        .text.endswith("\n\nIt is red.")
    )
    message = mail(text="\n")
    message.add_alternative("<h2>Pump</h2><p>It is <b>blue</b>.</p><style>p {}</style>", subtype="html")
    (part,) = one(read_file(written(tmp_path, "b.eml", message.as_bytes()))).parts
    assert part.markup == "markdown"
    assert part.text.endswith("\n\n## Pump\n\nIt is **blue**.")


def test_attached_documents(tmp_path: Path) -> None:
    inner = mail(text="From before.", Subject="Old/pump")
    inner.add_attachment(pdf("On page one.", "On page two."), "application", "pdf", filename="../scan.pdf")
    message = mail()
    message.add_alternative("<p>It is red.</p>", subtype="html")
    message.add_attachment(word_file(), "application", WORD, filename="note.docx")
    message.add_attachment(
        (SAMPLES / "costs.xlsx").read_bytes(), "application", "x-any", filename="costs.xlsx"
    )
    message.add_attachment(b"One.\nTwo.\n", "text", "plain", filename="note.txt")
    message.add_attachment(b"\x89PNG\r\n\x1a\n" + bytes(50), "image", "png", filename="logo.png")
    message.add_attachment(b"PK\x03\x04" + bytes(50), "application", "zip", filename="more.zip")
    message.add_attachment(b"PK\x03\x04", "application", WORD, filename="broken.docx")
    message.add_attachment(inner)
    read = read_file(written(tmp_path, "a.eml", message.as_bytes()))
    parts = one(read).parts
    assert [(part.place, part.text.split("\n")[-1]) for part in parts] == [
        ("", "It is red."),
        ("attachment note.docx", "A first paragraph about pumps."),
        ("attachment costs.xlsx, sheet Costs", "Item: Total; Cost: 1234.8"),
        ("attachment costs.xlsx, sheet Costs", "Cost: far below"),
        ("attachment costs.xlsx, sheet Notes", "Or Bob."),
        ("attachment note.txt", ""),
        ("attachment pump.eml", "From before."),
        ("attachment pump.eml, attachment scan.pdf, page 1", "On page one."),
        ("attachment pump.eml, attachment scan.pdf, page 2", "On page two."),
    ]
    assert parts[5].own_lines
    (skipped,) = read.skipped
    assert skipped.reason.startswith(
        "attachments without readable text: more.zip (its content is a ZIP archive"
    )
    assert "broken.docx (broken DOCX: " in skipped.reason


def test_a_document_attached_to_a_text_that_is_not_wanted_is_read(tmp_path: Path) -> None:
    """Some programs put the attachments into the HTML alternative."""
    html = EmailMessage()
    html.set_content("<p>It is blue.</p>", subtype="html")
    html.add_attachment(b"It has a seal.", "text", "plain", filename="seal.txt")
    message = mail()
    message.make_alternative()
    message.attach(html)
    parts = one(read_file(written(tmp_path, "a.eml", message.as_bytes()))).parts
    assert [part.text.split("\n")[-1] for part in parts] == ["It is red.", "It has a seal."]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"Subject: x\nContent-Type: text/plain; charset=latin-1\n\nm\xfcde", "müde"),
        (b"Subject: x\nContent-Type: text/plain; charset=klingon\n\nm\xc3\xbcde", "müde"),
        (b"Subject: x\n\nm\xc3\xbcde", "müde"),
        (b"Subject: x\nContent-Transfer-Encoding: base64\n\nbcO8ZGU", "müde"),
        ("Subject: x\n\nmüde".encode("utf-16"), "müde"),
        (b"Subject: x\nContent-Type: multipart/mixed; boundary=b\n\n--b\n\nnever ended", "never ended"),
        (b"Subject: x\nContent-Type: multipart/mixed\n\nno boundary", "no boundary"),
        (b"Date: 99 Foo\nTo: <<,;@\n\nbroken head", "broken head"),
    ],
)
def test_encodings_and_broken_messages(tmp_path: Path, raw: bytes, text: str) -> None:
    read = read_file(written(tmp_path, "a.eml", raw))
    assert one(read).parts[0].text.endswith(text)
    assert "date" not in one(read).metadata


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"Just a text.\n\nAnd more.", "its content is no e-mail: it has no sender, subject or date"),
        (b"Subject: x\nContent-Type: multipart/encrypted; boundary=b\n\n--b", "encrypted e-mail; save it decrypted"),
        (b"Subject: x\nContent-Type: application/pkcs7-mime\n\nMIAG", "encrypted e-mail; save it decrypted"),
    ],
)  # fmt: skip
def test_files_without_a_readable_message(tmp_path: Path, raw: bytes, said: str) -> None:
    assert reason(read_file(written(tmp_path, "a.eml", raw))) == said


def test_messages_within_messages_end(tmp_path: Path) -> None:
    message = mail(text="Innermost.")
    for number in range(6):
        outer = mail(text=f"Level {number}.", Subject=f"Level {number}")
        outer.add_attachment(message)
        message = outer
    read = read_file(written(tmp_path, "a.eml", message.as_bytes()))
    texts = " ".join(part.text for part in one(read).parts)
    assert "Level 2." in texts
    assert "Level 1." not in texts
    assert read.skipped[0].reason.startswith(
        "attachments without readable text: Level 4.eml (attachments without"
    )


def test_thousands_of_nested_parts_end(tmp_path: Path) -> None:
    head = "".join(f"Content-Type: multipart/mixed; boundary=b{n}\n\n--b{n}\n" for n in range(1500))
    read = read_file(written(tmp_path, "a.eml", f"Subject: x\n{head}\ntext"))
    assert len(read.documents) + len(read.skipped) == 1


def test_attachments_end_at_the_limit(tmp_path: Path) -> None:
    message = mail()
    for number in range(5):
        content = gzip.compress(b"word " * 100_000)
        message.add_attachment(content, "application", "gzip", filename=f"{number}.txt.gz")
    read = read_file(written(tmp_path, "a.eml", message.as_bytes()), ReadingLimits(characters=1_000_000))
    assert "longer than 1,000,000 characters" in reason(read)
