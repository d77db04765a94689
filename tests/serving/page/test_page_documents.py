"""Adding documents through the page, hostile ones too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.serving.page.conftest import Visit

HOSTILE = '<img src=x onerror="window.injected=1"><script>window.injected=2</script>'


def upload(here: Visit, kb: str, *files: Path) -> str:
    """Add files to a new knowledge base through the dialog; what the page says at the end."""
    page = here.page
    page.click("#open-documents")
    page.select_option("#upload-kb", "")
    page.fill("#new-name", kb)
    page.set_input_files("#files", [str(file) for file in files])
    page.click("#upload-submit")
    page.wait_for_selector("#upload-result", state="visible", timeout=60_000)
    return page.inner_text("#upload-result")


def test_upload_shows_progress_and_the_passages_can_be_asked(
    visit: Callable[..., Visit], tmp_path: Path
) -> None:
    notes = tmp_path / "zoltan.md"
    notes.write_text("# Zoltan bridge\n\nThe Zoltan bridge was opened in 1931 by Mayor Ilona Varga.\n")
    here = visit()
    page = here.page
    # What the bar goes through is noted by the page itself, since a small upload is over in a moment.
    page.evaluate("""() => {
        window.stages = [];
        new MutationObserver(() => window.stages.push(document.getElementById("upload-stage").textContent))
            .observe(document.getElementById("upload-stage"), { childList: true, characterData: true, subtree: true });
    }""")
    told = upload(here, "bridges", notes)
    assert "bridges: 1 of 1 added." in told
    stages = page.evaluate("window.stages")
    assert stages[0].startswith("zoltan.md: sending")
    assert len(set(stages)) >= 2
    assert not page.locator("#upload-progress").is_visible()
    assert page.locator("#document-list .document-name").all_inner_texts() == ["zoltan.md"]
    page.click("#documents [data-close]")
    assert page.input_value("#kb") == "bridges"
    here.choose("respec", kb="bridges", k="1", max_tokens="32")
    here.ask("When was the Zoltan bridge opened?")
    assert "1931" in page.inner_text("#turn-1-run-1-answer")
    assert page.locator(".source").count() == 1


def test_documents_are_text_and_nothing_else(visit: Callable[..., Visit], tmp_path: Path) -> None:
    record = {
        "title": f"{HOSTILE} title",
        "text": f"The gate code of Karst is 7741. {HOSTILE} Ask the porter of Karst.",
    }
    document = tmp_path / "gate.jsonl"
    document.write_text(json.dumps(record))
    here = visit()
    page = here.page
    assert "gates: 1 of 1 added." in upload(here, "gates", document)
    page.click("#documents [data-close]")
    here.choose("respec", kb="gates", k="1", max_tokens="32")
    here.ask(f"What is the gate code of Karst? {HOSTILE}")
    assert HOSTILE in page.inner_text(".source-title")
    assert HOSTILE in page.inner_text(".source-text")
    assert page.locator("main img, main script, dialog img").count() == 0
    assert page.evaluate("window.injected") is None


def test_a_bad_file_keeps_no_other_out_and_leaves_nothing(
    visit: Callable[..., Visit], tmp_path: Path
) -> None:
    picture, notes, more = (tmp_path / name for name in ("photo.md", "notes.md", "more.txt"))
    picture.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8)
    notes.write_text("The harbour of Mistra has four piers.")
    more.write_text("Mistra lies on a hill.")
    here = visit()
    page = here.page
    told = upload(here, "pictures", picture)
    assert "pictures: 0 of 1 added." in told
    assert "photo.md: its content is a PNG image, not text" in told
    assert "error" in (page.get_attribute("#upload-result", "class") or "")
    # The name is free: the same dialog takes good files under it, beside the bad one.
    assert "pictures" not in page.inner_text("#upload-kb")
    page.set_input_files("#files", [str(file) for file in (picture, notes, more)])
    page.click("#upload-submit")
    page.wait_for_selector("#upload-result:has-text('pictures: 2 of 3 added.')", timeout=60_000)
    results = page.locator("#upload-result li").all_inner_texts()
    assert [text.partition(":")[0] for text in results] == ["photo.md", "notes.md", "more.txt"]
    assert results[1:] == ["notes.md: added", "more.txt: added"]
    assert page.locator(".document-name").all_inner_texts() == ["more.txt", "notes.md"]


def test_a_document_is_removed(visit: Callable[..., Visit], tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("gone.md", "stays.md")]
    for file in files:
        file.write_text(f"The file {file.name} is about the lighthouse of Orla.")
    here = visit()
    page = here.page
    upload(here, "lights", *files)
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.click("button[aria-label='Remove gone.md']")
    assert page.locator(".document-name").all_inner_texts() == ["gone.md", "stays.md"]
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("button[aria-label='Remove gone.md']")
    page.wait_for_selector("#documents-note:has-text('gone.md was removed.')", timeout=60_000)
    assert page.locator(".document-name").all_inner_texts() == ["stays.md"]
    assert "lights (1 document" in page.locator("#upload-kb option:checked").inner_text()
    # What the server was started with is not the page's to remove.
    page.select_option("#upload-kb", "sample")
    page.wait_for_selector(".document-name:has-text('summaries.jsonl')")
    assert page.locator("#document-list button").count() == 0


def test_a_name_that_no_knowledge_base_can_have(visit: Callable[..., Visit], tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("Some text.")
    here = visit()
    told = upload(here, "../etc", notes)
    assert "error" in (here.page.get_attribute("#upload-result", "class") or "")
    assert "name" in told
    assert "../etc" not in here.page.locator("#kb").inner_text()
