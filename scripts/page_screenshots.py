"""Takes the pictures of docs/page.md from a running server: python scripts/page_screenshots.py URL [KB]."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
QUESTION = "What is copper, and what is it used for?"


def main(url: str, kb: str) -> None:
    """Take all of them."""
    chromium = shutil.which("chromium")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        take(browser, url, kb, "answer", (1280, 1000), "light", "adaptive")
        take(browser, url, kb, "comparison", (1280, 1420), "light", "adaptive", "plain")
        take(browser, url, kb, "narrow", (390, 900), "dark", "adaptive")
        take(browser, url, kb, "drafts", (390, 1300), "light", "speculative-rag")
        browser.close()


def take(
    browser: Browser, url: str, kb: str, name: str, size: tuple[int, int], scheme: str, *methods: str
) -> None:
    """Ask by one or two methods in a window of this size, and keep what it shows."""
    width, height = size
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("#method-1 option", state="attached")
    page.evaluate("document.querySelector('#choices').open = true")
    page.select_option("#kb", kb)
    for place, method in enumerate(methods, 1):
        page.select_option(f"#method-{place}", method)
    page.evaluate("document.querySelector('#choices').open = false")
    ask(page)  # the first answer also compiles and measures
    page.evaluate("document.querySelector('#new-chat').click()")
    ask(page)
    if width < 600:  # closed there at first
        page.get_by_text("How it was answered").last.click()
    page.mouse.move(0, 0)
    page.screenshot(path=FOLDER / f"page-{name}.png")
    context.close()


def ask(page: Page) -> None:
    """Ask, and wait until every answer has ended."""
    page.fill("#question", QUESTION)
    page.click("#submit")
    page.wait_for_selector("#submit", state="visible", timeout=120_000)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "sample")
