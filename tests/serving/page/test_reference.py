"""The reference at /docs, in Chromium: all that the description says, nothing from elsewhere, and a key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.serving.page.conftest import Visit
from tests.serving.page.live import LiveServer, serve

if TYPE_CHECKING:
    from playwright.sync_api import Browser

KEY = "reference-0123456789"


@pytest.fixture(scope="module")
def keyed(browser: Browser, smollm2: object) -> Iterator[LiveServer]:
    """Give a server with a key."""
    with serve(api_key=KEY) as server:
        yield server


@pytest.fixture
def reference(browser: Browser, keyed: LiveServer) -> Iterator[Visit]:
    """Open the reference and give the key that it asks for; nothing may be asked of other hosts."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    visit = Visit(context.new_page())
    asked: list[str] = []
    visit.page.on("request", lambda request: asked.append(request.url))
    visit.page.goto(f"{keyed.url}docs")
    visit.page.wait_for_selector("#key-dialog[open]")
    assert visit.page.locator(".route").count() == 0
    visit.page.fill("#key", KEY)
    visit.page.press("#key", "Enter")
    visit.page.wait_for_selector(".route")
    yield visit
    context.close()
    assert visit.complaints == []
    assert asked
    assert [url for url in asked if not url.startswith(keyed.url)] == []


def test_every_route_and_every_field_of_a_body_is_told(reference: Visit, keyed: LiveServer) -> None:
    described = keyed.app.openapi()
    told = reference.page.locator(".route h3").all_inner_texts()
    expected = [f"{verb.upper()}{path}" for path, verbs in described["paths"].items() for verb in verbs]
    assert sorted("".join(title.split()) for title in told) == sorted(expected)
    chat = reference.page.locator("#post-v1-chat-completions")
    names = chat.locator("table.fields").first.locator("> tbody > tr > th").all_inner_texts()
    fields = described["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert [name.removesuffix(" required") for name in names] == list(fields)
    assert f"curl -X POST {keyed.url}v1/chat/completions" in chat.inner_text()


def test_what_a_field_holds_is_shown_when_opened(reference: Visit, keyed: LiveServer) -> None:
    chat = reference.page.locator("#post-v1-chat-completions")
    chat.locator("summary", has_text="SpecragField").click()
    chat.locator("summary", has_text="options of adaptive").click()
    options = keyed.app.openapi()["components"]["schemas"]["adaptive.Options"]["properties"]
    assert options
    for name in options:
        chat.get_by_role(
            "rowheader", name=name, exact=True
        ).wait_for()  # the page fills what was opened behind the click
    assert chat.get_by_text("Name of a knowledge base of this server").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_small_screen(reference: Visit, scheme: str) -> None:
    reference.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    reference.page.set_viewport_size({"width": 360, "height": 800})
    assert reference.page.evaluate("document.documentElement.scrollWidth") <= 360
