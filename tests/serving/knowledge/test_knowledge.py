"""Knowledge bases over HTTP: made, filled, searched, emptied; names, contents and scopes."""

from __future__ import annotations

import gzip
import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from fastapi.testclient import TestClient

from specrag.errors import InputError
from specrag.serving.keys import ApiKey
from specrag.serving.knowledge.places import check_document, is_name
from specrag.serving.knowledge.uploads import check_content
from tests.serving.ops_server import MASTER, READER, WRITER, Program, bearer, make_app, program, wait_for_job

COPPER = b"# Copper\n\nCopper melts at 1,085 degrees.\n"
TIN = b"# Tin\n\nTin melts at 232 degrees.\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    folder = tmp_path_factory.mktemp("knowledge")
    (folder / "secret.txt").write_text("the secret outside", encoding="utf-8")
    keys: list[dict[str, Any]] = [
        {"name": "reader", "key": READER, "kbs": ["metals"]},
        {"name": "writer", "key": WRITER, "kbs": ["metals"], "upload": True},
        {"name": "master", "key": MASTER, "kbs": ["*"], "upload": True, "create": True},
    ]
    limits = {"max_upload_files": 4, "max_upload_bytes": 100_000}
    with program(folder, keys=keys, kb_root=str(folder / "kb"), page=False, **limits) as running:
        yield running


def client(server: Program, key: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers=bearer(key), timeout=120)


@pytest.fixture(scope="module")
def master(server: Program) -> Iterator[httpx.Client]:
    with client(server, MASTER) as asking:
        assert asking.post("/v1/kb", json={"name": "metals", "chunk_tokens": 100}).status_code == 201
        yield asking


@pytest.fixture(scope="module")
def metals(master: httpx.Client) -> httpx.Client:
    """A client and a server with two documents in the knowledge base ``metals``."""
    answer = upload(master, ("copper.md", COPPER), ("tin.md", TIN))
    assert answer.status_code == 202, answer.text
    job = wait_for_job(master, answer.json()["job"])
    assert job["status"] == "done", job
    assert (job["report"]["added"], job["report"]["passages"]) == (2, 2)
    return master


def upload(asking: httpx.Client, *files: tuple[str, bytes], kb: str = "metals") -> httpx.Response:
    return asking.post(f"/v1/kb/{kb}/documents", files=[("files", file) for file in files])


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def left_over(server: Program) -> list[str]:
    root = server.log.parent / "kb" / "metals" / "incoming"
    return [path.name for path in root.iterdir()] if root.is_dir() else []


def test_documents_are_found_replaced_and_deleted(master: httpx.Client, server: Program) -> None:
    def best(query: str) -> str:
        hits = master.post("/v1/kb/alloys/search", json={"query": query, "k": 1}).json()["data"]
        assert hits[0]["rank"] == 1
        assert set(hits[0]) >= {"title", "place", "source", "score", "text"}
        return str(hits[0]["text"])

    def done(answer: httpx.Response) -> dict[str, Any]:
        assert answer.status_code == 202, answer.text
        assert answer.headers["location"].endswith(answer.json()["job"])
        job = wait_for_job(master, answer.json()["job"])
        assert job["status"] == "done", job
        report: dict[str, Any] = job["report"]
        return report

    assert master.post("/v1/kb", json={"name": "alloys"}).status_code == 201
    done(upload(master, ("copper.md", COPPER), ("tin.md", TIN), kb="alloys"))
    assert "1,085" in best("When does copper melt?")
    listed = master.get("/v1/kb/alloys").json()
    assert (listed["documents"], listed["passages"], listed["writable"]) == (2, 2, True)
    done(upload(master, ("prices.csv", b"metal,price\nrhodium,4700\n"), kb="alloys"))
    assert "metal: rhodium; price: 4700" in best("What is the price of rhodium?")
    assert done(master.delete("/v1/kb/alloys/documents/prices.csv"))["removed"] == 1
    again = upload(master, ("copper.md", COPPER.replace(b"1,085", b"1,084.62")), kb="alloys")
    assert done(again)["updated"] == 1
    assert "1,084.62" in best("When does copper melt?")
    names = [entry["id"] for entry in master.get("/v1/kb/alloys/documents").json()["data"]]
    assert names == ["copper.md", "tin.md"]
    assert done(master.delete("/v1/kb/alloys/documents/tin.md"))["removed"] == 1
    assert master.get("/v1/kb/alloys").json()["documents"] == 1
    assert code(master.delete("/v1/kb/alloys/documents/tin.md")) == (404, "document_not_found")
    assert done(master.delete("/v1/kb/alloys/documents/copper.md"))["removed"] == 1
    assert master.get("/v1/kb/alloys").json()["documents"] == 0
    assert "no documents" in master.post("/v1/kb/alloys/search", json={"query": "x"}).text
    assert done(upload(master, ("copper.md", COPPER), kb="alloys"))["passages"] == 1
    assert not any((server.log.parent / "kb" / "alloys" / "incoming").iterdir())


def test_a_document_that_cannot_be_read_is_told_and_forgotten(metals: httpx.Client, server: Program) -> None:
    broken = b"%PDF-1.4\nthis is none\n"
    answer = upload(metals, ("broken.pdf", broken), ("zinc.txt", b"Zinc melts at 420 degrees."))
    job = wait_for_job(metals, answer.json()["job"])
    assert job["report"]["added"] == 1
    assert [entry["source"] for entry in job["report"]["skipped"]] == ["broken.pdf"]
    documents = server.log.parent / "kb" / "metals" / "documents"
    assert not (documents / "broken.pdf").exists()
    assert (documents / "zinc.txt").exists()


@pytest.mark.parametrize(
    ("name", "content", "refused"),
    [
        ("picture.csv", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), True),
        ("photo.md", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), True),
        ("broken.pdf", b"%PDF-1.4\nthis is none\n", False),
    ],
)
def test_a_failed_creation_leaves_nothing(
    master: httpx.Client, server: Program, name: str, content: bytes, refused: bool
) -> None:
    """Whether the upload is refused or its job fails; then the same name can be made with a good file."""
    kb = f"new-{name.partition('.')[0]}"
    there = master.get("/v1/kb").json()

    def create(*file: Any) -> httpx.Response:
        return master.post(f"/v1/kb/{kb}/documents?create=true", files=[("files", file)])

    answer = create(name, content)
    if refused:
        assert answer.status_code == 400, answer.text
    else:
        assert answer.status_code == 202, answer.text
        assert wait_for_job(master, answer.json()["job"])["status"] == "failed"
    assert master.get("/v1/kb").json() == there
    assert not (server.log.parent / "kb" / kb).exists()
    assert code(upload(master, ("tin.md", TIN), kb=kb)) == (404, "kb_not_found")
    assert wait_for_job(master, create("tin.md", TIN).json()["job"])["status"] == "done"
    assert master.get(f"/v1/kb/{kb}").json()["documents"] == 1
    assert code(create("copper.md", COPPER)) == (409, "kb_exists")
    assert master.get(f"/v1/kb/{kb}").json()["documents"] == 1
    with client(server, WRITER) as writer:
        asked = writer.post("/v1/kb/mine/documents?create=true", files=[("files", ("tin.md", TIN))])
        assert code(asked) == (403, "no_create")


def test_a_key_sees_its_own_knowledge_bases_alone(metals: httpx.Client, server: Program) -> None:
    assert metals.post("/v1/kb", json={"name": "hidden"}).status_code == 201
    job = upload(metals, ("gold.txt", b"Gold is hidden."), kb="hidden").json()["job"]
    assert wait_for_job(metals, job)["status"] == "done"
    with client(server, READER) as reader, client(server, WRITER) as writer:
        assert [kb["id"] for kb in reader.get("/v1/kb").json()["data"]] == ["metals"]
        assert {"hidden", "metals"} <= {kb["id"] for kb in metals.get("/v1/kb").json()["data"]}
        for asking in (reader, writer):
            unknown = asking.post("/v1/kb/nothing/search", json={"query": "gold"})
            for name in ("hidden", "%2e%2e", "..%2fkb", "metals%00", "METALS", "jobs"):
                answers = [
                    asking.get(f"/v1/kb/{name}"),
                    asking.post(f"/v1/kb/{name}/search", json={"query": "gold"}),
                    asking.get(f"/v1/kb/{name}/documents"),
                    upload(asking, ("a.txt", b"a"), kb=name),
                    asking.delete(f"/v1/kb/{name}/documents/gold.txt"),
                ]
                assert all(answer.status_code in {404, 405, 401} for answer in answers), name
                assert "gold" not in "".join(answer.text for answer in answers).lower()
            # What it may not see is told in the words of what is not there.
            hidden = asking.post("/v1/kb/hidden/search", json={"query": "gold"})
            assert (hidden.status_code, hidden.text) == (unknown.status_code, unknown.text)
            assert code(asking.get(f"/v1/kb/jobs/{job}")) == (404, "job_not_found")
            assert code(asking.post("/v1/kb", json={"name": "mine"})) == (403, "no_create")
        assert code(upload(reader, ("a.txt", b"a"))) == (403, "no_upload")
        assert code(reader.delete("/v1/kb/metals/documents/copper.md")) == (403, "no_upload")
        assert reader.get("/v1/kb/metals").json()["writable"] is False
        answer = upload(writer, ("lead.txt", b"Lead melts at 327 degrees."))
        assert answer.status_code == 202
        wait_for_job(writer, answer.json()["job"])  # another test counts the documents
    assert code(metals.post("/v1/kb", json={"name": "metals"})) == (409, "kb_exists")


def test_answers_come_from_what_a_key_may_read(tmp_path: Path) -> None:
    """The routes that answer look a knowledge base up with the key's scope, and tell no more than of an unknown one."""
    app = make_app(kb_root=tmp_path, page=False)
    service = app.state.service
    app.state.operation.bases.create("hidden")
    reader = ApiKey(name="reader", key=READER, kbs=("metals",))
    told = []
    for name in ("hidden", "nothing", "../hidden"):
        with pytest.raises(InputError) as caught:
            service.knowledge_base(name, reader.may_read)
        told.append(str(caught.value).replace(name, "NAME"))
    assert len(set(told)) == 1
    with pytest.raises(InputError, match="no documents"):
        service.knowledge_base("hidden", lambda _: True)


def test_there_is_an_end_to_knowledge_bases(tmp_path: Path) -> None:
    app = make_app(kb_root=tmp_path, max_kbs=1, page=False)
    asking = TestClient(app, base_url="http://localhost")
    assert asking.post("/v1/kb", json={"name": "one"}).status_code == 201
    assert asking.post("/v1/kb", json={"name": "two"}).json()["error"]["code"] == "invalid_value"
    for body in ({"name": "x", "chunk_tokens": 15}, {"name": "x", "chunk_tokens": 20, "chunk_overlap": 11}):
        assert asking.post("/v1/kb", json=body).status_code == 400
    without_root = TestClient(make_app(page=False), base_url="http://localhost")
    assert without_root.post("/v1/kb", json={"name": "one"}).status_code == 400


def test_uploads_are_taken_whole_or_not_at_all(metals: httpx.Client, server: Program) -> None:
    good = ("good.txt", b"This one is good.")
    before = metals.get("/v1/kb/metals").json()
    for files in (
        [good, ("../../secret.txt", b"x y z")],
        [good, ("/etc/passwd.txt", b"x y z")],
        [good, ("a\\b.txt", b"x y z")],
        [good, (".hidden.txt", b"x y z")],
        [good, ("run.exe", b"#!/bin/sh")],
        [good, ("image.txt", b"\x89PNG\r\n\x1a\n" + bytes(100))],
        [good, ("paper.pdf", b"no PDF at all")],
        [good, ("GOOD.txt", b"the same name but for its case")],
        [good, ("empty.txt", b"")],
        [good, ("link.docx", zipped({"word/other.xml": b"x"}))],
        [good, ("bomb.txt.gz", gzip.compress(bytes(50_000_000)))],
    ):
        answer = upload(metals, *files)
        assert code(answer) == (400, "invalid_value"), files[1][0]
        assert str(server.log.parent) not in answer.text
    five = [(f"{number}.txt", b"some text") for number in range(5)]
    assert upload(metals, *five).status_code == 413
    assert upload(metals, good, ("large.txt", b"x" * 100_001)).status_code == 413
    assert metals.post("/v1/kb/metals/documents", json={}).status_code == 415
    for body in (b"", b"--b", b"--b\r\n\r\n", b"--b--\r\n", b"x" * 100, b"--b\r\nA: b\r\n\r\nc\r\n--b--"):
        answer = metals.post(
            "/v1/kb/metals/documents",
            content=body,
            headers={"Content-Type": "multipart/form-data; boundary=b"},
        )
        assert code(answer) == (400, "invalid_multipart"), body
    assert metals.get("/v1/kb/metals").json()["documents"] >= before["documents"]
    names = {path.name for path in (server.log.parent / "kb" / "metals" / "documents").iterdir()}
    assert not names & {"good.txt", "GOOD.txt", "secret.txt"}
    assert left_over(server) == []


def test_a_link_in_a_document_is_text(metals: httpx.Client, server: Program) -> None:
    """Nothing that a document names is fetched or opened."""
    secret = server.log.parent / "secret.txt"
    page = f"""<html><head><title>Links</title><link rel=stylesheet href="http://127.0.0.1:{server.port}/broken">
      </head><body><p>Iridium page.</p><img src="file://{secret}"><iframe src="file://{secret}"></iframe>
      <object data="http://127.0.0.1:{server.port}/broken"></object></body></html>"""
    xml = f'<!DOCTYPE a [<!ENTITY x SYSTEM "file://{secret}">]><html><body><p>Osmium &x;</p></body></html>'
    markdown = f"# Rhodium\n\n![s](file://{secret}) [t](http://127.0.0.1:{server.port}/broken)\n"
    files = [("a.html", page.encode()), ("b.xhtml", xml.encode()), ("c.md", markdown.encode())]
    job = wait_for_job(metals, upload(metals, *files).json()["job"])
    assert job["status"] == "done", job
    for query in ("iridium", "osmium", "rhodium", "secret outside"):
        answer = metals.post("/v1/kb/metals/search", json={"query": query, "k": 100, "index": "bm25"})
        assert "the secret outside" not in answer.text
    assert '"/broken"' not in server.log.read_text(encoding="utf-8")


def test_search_checks_what_it_is_asked(metals: httpx.Client) -> None:
    def search(**body: Any) -> httpx.Response:
        return metals.post("/v1/kb/metals/search", json={"query": "copper", "index": "bm25", **body})

    assert search(query="melts", where={"source": "tin.md"}).json()["data"][0]["source"] == "tin.md"
    both = search(query="melts", where=["source=tin.md,copper.md", "not source=copper.md"])
    assert {hit["source"] for hit in both.json()["data"]} == {"tin.md"}
    assert len(search(k=100).json()["data"]) <= 100
    bodies: list[dict[str, Any]] = [
        {"query": ""},
        {"query": "   "},
        {"query": "a\0b"},
        {"query": "x" * 20_001},
        {"query": 7},
        {"k": 0},
        {"k": 10**30},
        {"k": 1.5},
        {"k": True},
        {"index": "none"},
        {"where": {"nothing": 1}},
        {"where": {"source": {"~": 1}}},
        {"where": {"source'; DROP TABLE passages; --": 1}},
        {"where": []},
        {"where": ["nothing=1"]},
        {"unknown": 1},
    ]
    for body in bodies:
        answer = search(**body)
        assert answer.status_code == 400, (body, answer.text)
        assert answer.json()["error"]["type"] == "invalid_request_error"


def zipped(entries: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in entries.items():
            # ZipInfo's fixed date: the bytes name tests, and all workers of a parallel run must name them the same.
            archive.writestr(zipfile.ZipInfo(name), content, compress_type=zipfile.ZIP_DEFLATED)
    return data.getvalue()


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a", "a.exe", "a/b.txt", "a\0.txt", "a\n.txt", "\u202ea.txt", "é.txt".replace("é", "e\u0301"),
     "x" * 250 + ".txt", " a.txt", "a.txt.", "\udcff.txt", "a:b.txt", "con\u200b.txt"],
)  # fmt: skip
def test_names_of_documents_that_are_refused(name: str) -> None:
    with pytest.raises(InputError):
        check_document(name)


@pytest.mark.parametrize(
    "name",
    [
        "a.txt",
        "Ein Bericht (2).PDF",
        "données.json.gz",
        "文書.md",
        "a.b.c.html",
        "Re_ pump.eml",
        "Costs.XLSX",
        "a.rs",
    ],
)
def test_names_of_documents_that_are_taken(name: str) -> None:
    assert check_document(name) == name


def test_names_of_knowledge_bases() -> None:
    assert all(map(is_name, ["a", "wiki-2", "a_b", "0", "x" * 64]))
    assert not any(map(is_name, ["", "-a", "A", "a.b", "a/b", "..", "jobs", "x" * 65, "a\n", "ä"]))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.pdf", b"GIF89a" + bytes(20)),
        ("a.docx", b"%PDF-1.4"),
        ("a.docx", b"PK\x03\x04" + bytes(100)),
        ("a.docx", zipped({"word/document.xml": bytes(30_000_000)})),
        ("a.xlsx", zipped({"word/document.xml": b"<w/>"})),
        ("a.epub", zipped({"META-INF/container.xml": bytes(30_000_000)})),
        ("a.odt.gz", gzip.compress(zipped({"content.xml": b"<c/>"}), mtime=0)),
        ("a.eml", bytes(range(256)) * 10),
        ("a.txt", b"%PDF-1.4 text"),
        ("a.txt", b"\x7fELF" + bytes(100)),
        ("a.md", bytes(range(256)) * 10),
        ("a.json", zipped({"a": b"b"})),
        ("a.html", b"SQLite format 3\0" + b"x" * 100),
        ("a.txt.gz", b"\x1f\x8b broken"),
        ("a.txt.gz", gzip.compress(b"\x7fELF" + bytes(100), mtime=0)),
        ("a.pdf.gz", gzip.compress(b"%PDF-1.4", mtime=0)),
        ("a.txt.gz", gzip.compress(b"", mtime=0)),
    ],
)
def test_contents_that_are_not_what_the_name_says(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        check_content(path, name)
    assert str(tmp_path) not in str(caught.value)


def test_contents_that_are(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for name, data in {
        "a.pdf": b"\n%PDF-1.7\n",
        "a.docx": zipped({"word/document.xml": b"<w/>", "[Content_Types].xml": b"<t/>"}),
        "a.xlsx": zipped({"xl/workbook.xml": b"<w/>"}),
        "a.eml": b"Subject: x\n\ntext",
        "a.txt": "MZ is a beginning, grüße".encode(),
        "b.txt": "grüße".encode("utf-16"),
        "c.txt": ("ü" * 40_000).encode(),  # a cut inside a character is no fault
        "d.txt": ("xü" * 40_000).encode(),
        "a.json.gz": gzip.compress(b'[{"text": "a"}]'),
    }.items():
        path.write_bytes(data)
        check_content(path, name)


def test_root_of_the_tests_is_no_link(server: Program) -> None:
    """Else the comparison of paths above would prove nothing."""
    assert os.path.realpath(server.log.parent) == str(server.log.parent)
