"""The page's files as they are served, without a browser."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from specrag.serving.page.routes import FOLDER, page_routes

FILES = sorted(path for path in FOLDER.iterdir() if path.is_file() and path.suffix != ".py")
# The one address that a file may name is no place to fetch from: it is the name of SVG's vocabulary.
SVG_NAMESPACE = "http://www.w3.org/2000/svg"


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(Starlette(routes=page_routes())) as client:
        yield client


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_and_every_file_that_it_names_are_served(client: TestClient, path: str) -> None:
    index = client.get(path)
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    named = re.findall(r'(?:src|href)="(page/[^"]+)"', index.text)
    assert len(named) >= 4
    for part in named:
        assert client.get(f"/{part}").status_code == 200, part


def test_only_the_pages_own_kinds_are_served(client: TestClient) -> None:
    for name in ("__init__.py", "__pycache__", "nothing.js"):
        assert client.get(f"/page/{name}").status_code == 404, name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_type_and_imports(client: TestClient, file: object) -> None:
    name = getattr(file, "name", "")
    answer = client.get(f"/page/{name}")
    kinds = {"js": "text/javascript", "css": "text/css", "html": "text/html", "svg": "image/svg+xml"}
    assert answer.headers["content-type"].split(";")[0] == kinds[name.rpartition(".")[2]]
    for imported in re.findall(r'from "\./([^"]+)"', answer.text):
        assert (FOLDER / imported).is_file(), imported


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_is_inline_from_elsewhere_or_read_as_markup(file: object) -> None:
    text = (FOLDER / getattr(file, "name", "")).read_text().replace(SVG_NAMESPACE, "")
    assert "//" not in re.sub(r"(?m)^\s*//.*|\s// .*|/\*\*?.*?\*/", "", text).replace("https?://", "")
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
    )
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=", text)


def test_unchanged_files_are_not_sent_again(client: TestClient) -> None:
    first = client.get("/page/main.js")
    assert first.headers["cache-control"] == "no-cache"
    again = client.get("/page/main.js", headers={"If-None-Match": f'"other", W/{first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/page/main.js", headers={"If-None-Match": '"other"'}).content == first.content


@pytest.mark.parametrize("path", ["/page/none.js", "/page/..%2fpage.py", "/page/%2e%2e/page.py", "/page/"])
def test_no_path_leads_elsewhere(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404
