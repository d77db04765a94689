"""Files that hold no text, are broken, huge, or move while they are read: each with its reason, none raises."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from specrag.errors import InputError
from specrag.retrieval.documents.files import find_files
from specrag.retrieval.documents.reader import read_file
from tests.retrieval.sample_files import file_of, one, pdf, reason, word_file, written

NOBODY = 65534


# Bad content


@pytest.mark.parametrize(
    "name", ["a.txt", "a.md", "a.html", "a.pdf", "a.docx", "a.jsonl", "a.json", "a.txt.gz"]
)
@pytest.mark.parametrize("content", [b"", b" \n\t\n "])
def test_empty_file_is_reported(tmp_path: Path, name: str, content: bytes) -> None:
    reason(read_file(written(tmp_path, name, content)))


@pytest.mark.parametrize(
    "name", ["a.txt", "a.md", "a.html", "a.pdf", "a.docx", "a.jsonl", "a.json", "a.bin", "a.gz"]
)
def test_binary_junk_is_reported_under_any_name(tmp_path: Path, name: str) -> None:
    reason(read_file(written(tmp_path, name, bytes(range(256)) * 40)))


def test_binary_junk_without_a_zero_byte(tmp_path: Path) -> None:
    junk = bytes(byte for byte in os.urandom(40_000) if byte)
    reason(read_file(written(tmp_path, "a.txt", junk)))


def test_unknown_binary_kinds_say_what_to_do(tmp_path: Path) -> None:
    assert "save it as DOCX" in reason(read_file(written(tmp_path, "slides.ppt", b"\xd0\xcf\x11\xe0")))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"\x89PNG\r\n\x1a\n" + bytes(50), "its content is a PNG image, not text"),
        ("a.md", pdf("text"), "its content is a PDF, not text"),
        ("photo.png", b"\x89PNG\r\n\x1a\n" + bytes(50), "its content is a PNG image, not text"),
        ("a.json", b"RIFF\x10\0\0\0WEBPVP8 ", "its content is a WebP image, not text"),
        ("a.pdf", word_file(), "its content is a ZIP archive, not a PDF"),
        ("a.pdf", b"Just words.", "its content is something else, not a PDF"),
        ("a.docx", pdf("text"), "its content is a PDF, not a DOCX"),
        (
            "a.docx",
            b"\xd0\xcf\x11\xe0" + bytes(50),
            "its content is an old or encrypted Office file, not a DOCX",
        ),
        ("a.txt.gz", gzip.compress(b"\x7fELF" + bytes(50), mtime=0), "its content is a program, not text"),
    ],
)
def test_file_that_lies_about_its_kind(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    assert reason(read_file(written(tmp_path, name, content))) == said


def test_zip_archive_that_is_no_docx(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.docx", "w") as archive:
        archive.writestr("notes.txt", "text")
    assert reason(read_file(file_of(tmp_path / "a.docx"))) == "its content is a ZIP archive, not a DOCX"


@pytest.mark.parametrize(
    "text", ["MZ is no program here.", "ID3 tags", "Rar! it is.", "RIFF, a format", "PK"]
)
def test_text_that_begins_like_another_kind(tmp_path: Path, text: str) -> None:
    assert one(read_file(written(tmp_path, "a.txt", text))).parts[0].text == text


def test_what_a_converter_raises_costs_only_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: bytes) -> str:
        raise LookupError("no such\nencoding")

    monkeypatch.setattr("specrag.retrieval.documents.converters.decode_html", fail)
    said = reason(read_file(written(tmp_path, "a.html", "<p>x")))
    assert said == "it cannot be converted: LookupError: no such encoding"


def test_ten_megabytes_of_text(tmp_path: Path) -> None:
    text = "A sentence about pumps and valves, again.\n" * 250_000
    file = written(tmp_path, "large.txt", text)
    started = time.perf_counter()
    assert one(read_file(file)).parts[0].text == text
    assert time.perf_counter() - started < 10  # 0.1 s on a quiet machine


def test_pdf_without_text(tmp_path: Path) -> None:
    assert "no text; run OCR first" in reason(
        read_file(written(tmp_path, "a.pdf", pdf("", "", drawing=True)))
    )
    assert "no text; run OCR first" in reason(read_file(written(tmp_path, "b.pdf", pdf(""))))


def test_pdf_with_some_pages_without_text(tmp_path: Path) -> None:
    read = read_file(written(tmp_path, "a.pdf", pdf("First.", "", "Third.", drawing=True)))
    assert [part.place for part in one(read).parts] == ["page 1", "page 3"]
    assert [entry.reason for entry in read.skipped] == [
        "1 of 3 pages hold no readable text (page 2); run OCR if they should"
    ]
    blank = read_file(written(tmp_path, "b.pdf", pdf("First.", "", "Third.")))
    assert not blank.skipped  # a page with nothing on it is no loss


def test_encrypted_pdf(tmp_path: Path) -> None:
    assert "password" in reason(read_file(written(tmp_path, "a.pdf", pdf("secret", password="x"))))


@pytest.mark.parametrize("keep", [10, 300, 600])
def test_broken_pdf_and_docx(tmp_path: Path, keep: int) -> None:
    assert "broken PDF" in reason(read_file(written(tmp_path, "a.pdf", pdf("text")[:keep])))
    assert "broken DOCX" in reason(read_file(written(tmp_path, "a.docx", word_file()[:keep])))


def test_broken_gzip(tmp_path: Path) -> None:
    packed = gzip.compress(os.urandom(1000))
    assert "broken gzip" in reason(read_file(written(tmp_path, "a.jsonl.gz", packed[:500])))
    assert "broken gzip" in reason(read_file(written(tmp_path, "b.jsonl.gz", b"no gzip")))


def test_file_larger_than_memory_should_hold(tmp_path: Path) -> None:
    path = tmp_path / "huge.txt"
    with path.open("wb") as stream:
        stream.truncate(2**40)  # a sparse file
    assert "larger than 512 MiB" in reason(read_file(file_of(path)))
    bomb = written(tmp_path, "bomb.txt.gz", gzip.compress(bytes(2**20), 9) * 600)
    assert "unpacks to larger" in reason(read_file(bomb))


# Files that move


def test_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"x" * 40_000_000)
    file = file_of(path)
    code = "import sys\nwith open(sys.argv[1], 'ab', 0) as f:\n while True: f.write(b'y'); print(flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as writer:
        assert writer.stdout
        writer.stdout.readline()
        # Its output must go on, or it would wait for a reader.
        drain = subprocess.Popen(["cat"], stdin=writer.stdout, stdout=subprocess.DEVNULL)
        read = read_file(file)
        writer.kill()
        drain.wait()
    assert "changed while it was read" in reason(read)
    assert read.sha256 == ""
    assert one(read_file(file_of(path))).source == "log.txt"  # a rerun takes it up


def test_change_that_leaves_size_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    file = file_of(path)
    now = time.time_ns()

    def write_meanwhile() -> int:  # the clock is asked once the bytes are read
        path.write_text("behind")
        os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
        return now

    monkeypatch.setattr(time, "time_ns", write_meanwhile)
    assert "changed while it was read" in reason(read_file(file))


def test_file_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, new = tmp_path / "a.txt", tmp_path / "new"
    path.write_text("before")
    new.write_text("behind")
    os.utime(new, ns=(0, path.stat().st_mtime_ns))
    file = file_of(path)
    real_fstat = os.fstat

    def replace_after_the_look(descriptor: int) -> os.stat_result:
        status = real_fstat(descriptor)
        if new.exists():
            new.rename(path)
        return status

    monkeypatch.setattr(os, "fstat", replace_after_the_look)
    assert "changed while it was read" in reason(read_file(file))
    assert one(read_file(file)).parts[0].text == "behind"


def test_file_that_vanishes(tmp_path: Path) -> None:
    file = written(tmp_path, "a.txt", "text")
    file.path.unlink()
    assert "No such file" in reason(read_file(file))


def test_pipe_in_the_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    file = written(tmp_path, "a.txt", "text")
    file.path.unlink()
    os.mkfifo(file.path)
    assert "no longer a file" in reason(read_file(file))


@pytest.fixture
def without_rights() -> Iterator[Path]:
    """A folder that is read without the rights of root."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "open.txt").write_text("text")
        (folder / "closed.txt").write_text("text")
        (folder / "closed").mkdir()
        root = os.geteuid() == 0
        for path in (folder / "closed.txt", folder / "closed"):
            path.chmod(0)
        if root:
            os.seteuid(NOBODY)
        yield folder
        if root:
            os.seteuid(0)
        (folder / "closed").chmod(0o700)


def test_no_permission(without_rights: Path) -> None:
    found = find_files([without_rights])
    reads = {file.source: read_file(file) for file in found.files}
    assert one(reads["open.txt"])
    assert "Permission denied" in reason(reads["closed.txt"])
    assert [(entry.source, entry.reason) for entry in found.skipped] == [
        ("closed", "cannot be listed: Permission denied")
    ]


def test_path_without_permission(without_rights: Path) -> None:
    with pytest.raises(InputError, match="Permission denied"):
        find_files([without_rights / "closed" / "a.txt"])
