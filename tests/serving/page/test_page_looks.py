"""The page at both widths, in both themes, by keyboard, and for those who cannot see it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.serving.page.conftest import Visit

if TYPE_CHECKING:
    from playwright.sync_api import Page

QUESTION = "What is copper used for?"

# WCAG 2.2, 1.4.3: 4.5 for text, 3 for large text (24 pixels, or 18.66 bold). Colours are read as the browser has
# computed them; the ground is the nearest one behind a text that is not transparent.
CONTRASTS = """() => {
    const parse = (text) => {
        const canvas = document.createElement("canvas").getContext("2d");
        canvas.fillStyle = text;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const light = ([r, g, b]) => {
        const [x, y, z] = [r, g, b].map((part) => part / 255)
            .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * x + 0.7152 * y + 0.0722 * z;
    };
    const ground = (node) => {
        for (let at = node; at; at = at.parentElement) {
            const colour = parse(getComputedStyle(at).backgroundColor);
            if (colour[3] === 255) return colour;
        }
        return [255, 255, 255, 255];
    };
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode.parentElement;
        if (!walker.currentNode.textContent.trim() || !node.checkVisibility() || node.closest("option, svg")) continue;
        const style = getComputedStyle(node);
        const [a, b] = [light(parse(style.color)), light(ground(node))];
        const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        const size = parseFloat(style.fontSize);
        const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
        if (contrast < (large ? 3 : 4.5)) found.push(`${contrast.toFixed(2)}: ${walker.currentNode.textContent}`);
    }
    return found;
}"""

NAMELESS = """() => [...document.querySelectorAll("button, input, select, textarea, a[href], dialog, [role=img]")]
    .filter((node) => !(node.labels?.length || node.textContent.trim() || node.getAttribute("aria-label")
        || document.getElementById(node.getAttribute("aria-labelledby") ?? "")?.textContent.trim()))
    .map((node) => node.outerHTML)"""


def violations(page: Page) -> str:
    """What axe finds wrong with what is on the page now; empty for nothing."""
    results = Axe().run(page)
    return results.generate_report() if results.violations_count else ""


OVERFLOWING = """() => document.documentElement.scrollWidth - document.documentElement.clientWidth"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_everything_fits_and_can_be_read(visit: Callable[..., Visit], width: int, scheme: str) -> None:
    here = visit(width=width, scheme=scheme)
    page = here.page
    assert page.evaluate(CONTRASTS) == []
    here.choose("respec", "plain", max_tokens="12")
    page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
    here.ask(QUESTION)
    page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
    page.wait_for_selector(".passes td")
    assert page.evaluate(CONTRASTS) == []
    assert page.evaluate(NAMELESS) == []
    assert page.evaluate(OVERFLOWING) == 0
    ids = page.eval_on_selector_all("[id]", "all => all.map(one => one.id)")
    assert len(ids) == len(set(ids))
    dark = page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(18, 20, 23)"
    assert dark == (scheme == "dark")
    tops = [box["y"] for box in (page.locator(".run").nth(index).bounding_box() for index in (0, 1)) if box]
    assert (tops[0] == tops[1]) == (width == 1280)
    page.click("#open-documents")
    assert page.evaluate(CONTRASTS) == []
    box: Any = page.locator("#documents").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_any_state(visit: Callable[..., Visit], scheme: str, tmp_path: Path) -> None:
    here = visit(scheme=scheme)
    page = here.page
    assert violations(page) == "", "empty"
    here.choose("plain", max_tokens="12")
    page.fill("#question", QUESTION)
    page.press("#question", "Enter")
    page.wait_for_selector(".answer .token")
    assert violations(page) == "", "answering"
    page.wait_for_selector("#submit", state="visible", timeout=60_000)
    page.locator(".passes summary").click()
    assert violations(page) == "", "answered"
    page.locator(".answer a.citation").first.click()
    assert violations(page) == "", "a passage"
    here.choose("respec", "plain", max_tokens="12")
    here.ask(QUESTION)
    assert here.last(".comparison").is_visible()
    assert violations(page) == "", "comparison"
    here.choose("speculative-rag", max_tokens="12")
    page.fill("#option-1-drafts", "2")
    page.fill("#option-1-draft_tokens", "16")
    assert violations(page) == "", "choices"
    here.ask(QUESTION)
    assert page.locator(".draft-card").count() == 2
    assert violations(page) == "", "drafts"
    page.click("#new-chat")
    here.choose("respec")
    here.ask("How do I reset my router password?")
    assert page.locator(".abstention").is_visible()
    assert violations(page) == "", "abstained"
    here.choose("respec", k="99")
    here.ask(QUESTION)
    assert here.last("[role=alert]").is_visible()
    assert violations(page) == "", "error"
    here.choose("rapid", kb="")
    assert page.locator("#context-field").is_visible()
    assert violations(page) == "", "long text"
    bad = tmp_path / "bad.md"
    bad.write_bytes(b"\x89PNG\r\n\x1a\n")
    page.click("#open-documents")
    page.wait_for_selector(".document-name")
    page.select_option("#upload-kb", "")
    page.fill("#new-name", "nothing")
    page.set_input_files("#files", str(bad))
    page.click("#upload-submit")
    page.wait_for_selector("#upload-result li")
    assert violations(page) == "", "documents"


def test_a_phone_shows_the_answer_and_folds_the_rest(visit: Callable[..., Visit]) -> None:
    here = visit(width=390, height=844)
    page = here.page
    assert not page.locator("#kb").is_visible()
    assert not page.locator("#chats").is_visible()
    here.choose("plain", max_tokens="12")
    here.ask(QUESTION)
    assert not page.locator("#kb").is_visible()
    boxes: list[Any] = [
        page.locator(name).bounding_box() for name in (".answer", ".headline", ".how", "#ask")
    ]
    answer, headline, how, composer = boxes
    assert 0 <= answer["y"] < headline["y"] < how["y"] < composer["y"]
    assert not page.locator(".figures").is_visible()
    assert not page.locator(".source").first.is_visible()
    sizes = page.evaluate(
        "['.answer', '.headline', '.figures'].map((name) =>"
        " parseFloat(getComputedStyle(document.querySelector(name + ' dd') ?? document.querySelector(name)).fontSize))"
    )
    assert sizes[0] > sizes[1] >= sizes[2]
    # A citation opens the sources that were folded.
    page.locator(".answer a.citation").first.click()
    assert page.locator(".source.cited").first.is_visible()


def test_origins_differ_in_more_than_their_colour(visit: Callable[..., Visit]) -> None:
    page = visit().page
    looks = page.eval_on_selector_all(
        "#empty-legend .token",
        """all => all.map((one) => {
        const style = getComputedStyle(one);
        return style.textDecorationLine + style.textDecorationStyle;
    })""",
    )
    assert len(looks) == len(set(looks)) == 5


def test_the_theme_is_chosen_and_kept(visit: Callable[..., Visit]) -> None:
    page = visit().page
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(ground)
    assert page.inner_text("#theme") == "Theme: system"
    page.click("#theme")
    assert page.inner_text("#theme") == "Theme: light"
    assert page.evaluate(ground) == light
    page.click("#theme")
    assert page.inner_text("#theme") == "Theme: dark"
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark


def test_everything_can_be_done_by_keyboard(visit: Callable[..., Visit]) -> None:
    page = visit().page
    keyboard = page.keyboard
    focused = "document.activeElement.id || document.activeElement.className"

    keyboard.press("Tab")
    assert page.evaluate(focused) == "skip"
    keyboard.press("Enter")
    assert page.evaluate(focused) == "question"
    keyboard.type("What is copper")
    keyboard.press("Shift+Enter")
    keyboard.type("used for?")
    assert page.input_value("#question") == "What is copper\nused for?"
    summary = "document.activeElement.matches('#choices > summary')"
    keyboard.press("Tab")
    assert page.evaluate(focused) == "submit"
    keyboard.press("Tab")
    assert page.evaluate(summary)
    for expected in ("kb", "method-1", "method-2"):
        keyboard.press("Tab")
        assert page.evaluate(focused) == expected
        if expected == "kb":
            keyboard.type("sam")  # other tests add knowledge bases
            assert page.input_value("#kb") == "sample"
    for expected in ("adaptive", "plain"):
        keyboard.press("ArrowDown")
        assert page.input_value("#method-2") == expected
    page.focus("#submit")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    keyboard.press("Enter")
    assert page.evaluate(focused) == "stop"
    page.wait_for_selector("#submit", state="visible", timeout=60_000)
    assert page.evaluate(focused) == "submit"
    assert page.locator(".run-state").all_inner_texts() == ["Done", "Done"]

    page.focus(".answer a.citation >> nth=0")
    keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "turn-1-run-1-source-1"
    reached: list[str] = []
    while not reached or not reached[-1].endswith("-more"):
        keyboard.press("Tab")
        reached.append(page.evaluate(focused))
        assert len(reached) < 30, reached
    before = page.get_attribute(":focus", "aria-expanded")
    assert before in {"true", "false"}
    keyboard.press("Enter")
    assert page.get_attribute(":focus", "aria-expanded") != before

    page.focus("#open-documents")
    keyboard.press("Enter")
    assert page.locator("#documents[open]").count() == 1
    assert page.evaluate("document.activeElement.closest('dialog')?.id") == "documents"
    keyboard.press("Escape")
    assert page.locator("#documents[open]").count() == 0
    assert page.evaluate(focused) == "open-documents"


def test_a_screen_reader_is_told_of_events_not_of_tokens(visit: Callable[..., Visit]) -> None:
    here = visit()
    page = here.page
    page.evaluate("""() => {
        window.told = [];
        const status = document.getElementById("status");
        new MutationObserver(() => window.told.push(status.textContent)).observe(status, { childList: true });
    }""")
    here.choose("respec", max_tokens="40")
    here.ask(QUESTION)
    told = page.evaluate("window.told")
    assert 2 <= len(told) <= 4
    assert "sources found" in told[-2]
    assert re.search(r"done, \d+ tokens in [\d.]+ s\.$", told[-1])
    assert page.locator("main [aria-live]").count() == 1


def test_nothing_moves_for_those_who_asked_for_that(visit: Callable[..., Visit]) -> None:
    still = visit(reduced_motion="reduce").page
    moving = visit(reduced_motion="no-preference").page
    for page, animated in ((still, False), (moving, True)):
        page.evaluate("""() => {
            const place = Object.assign(document.createElement("p"), { className: "run-state" });
            place.dataset.state = "running";
            document.querySelector("main").append(place);
        }""")
        name = page.evaluate(
            "getComputedStyle(document.querySelector('.run-state'), '::before').animationName"
        )
        assert (name != "none") == animated
