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
    assert "bridges: 1 added" in told
    stages = page.evaluate("window.stages")
    assert stages[0].startswith("Sending")
    assert len(set(stages)) >= 2
    assert not page.locator("#upload-progress").is_visible()
    assert page.locator(".bases th[scope=row]").all_inner_texts().count("bridges") == 1
    page.click("#documents [data-close]")
    assert page.input_value("#kb") == "bridges"
    here.choose("respec", kb="bridges", k="1", max_tokens="32")
    here.ask("When was the Zoltan bridge opened?")
    assert "1931" in page.inner_text("#run-1-answer")
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
    assert "gates: 1 added" in upload(here, "gates", document)
    page.click("#documents [data-close]")
    here.choose("respec", kb="gates", k="1", max_tokens="32")
    here.ask(f"What is the gate code of Karst? {HOSTILE}")
    assert HOSTILE in page.inner_text(".source-title")
    assert HOSTILE in page.inner_text(".source-text")
    assert page.locator("main img, main script, dialog img").count() == 0
    assert page.evaluate("window.injected") is None


def test_files_that_cannot_be_read_are_named(visit: Callable[..., Visit], tmp_path: Path) -> None:
    picture = tmp_path / "photo.md"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8)
    here = visit()
    told = upload(here, "pictures", picture)
    assert "photo.md" in told or "error" in (here.page.get_attribute("#upload-result", "class") or "")
    assert not here.page.locator("#upload-submit").is_disabled()
    # The name is free: the same dialog takes a good file under it.
    assert "pictures" not in here.page.inner_text("#bases")
    notes = tmp_path / "notes.md"
    notes.write_text("Some text.")
    here.page.set_input_files("#files", [str(notes)])
    here.page.click("#upload-submit")
    here.page.wait_for_selector("#upload-result:has-text('pictures: 1 added')", timeout=60_000)


def test_a_name_that_no_knowledge_base_can_have(visit: Callable[..., Visit], tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("Some text.")
    here = visit()
    told = upload(here, "../etc", notes)
    assert "error" in (here.page.get_attribute("#upload-result", "class") or "")
    assert "name" in told
    assert "../etc" not in here.page.locator("#kb").inner_text()
