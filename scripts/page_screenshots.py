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
        take(browser, url, kb, "answer", 1280, "light", "adaptive")
        take(browser, url, kb, "comparison", 1280, "light", "adaptive", "plain", height=1420)
        take(browser, url, kb, "narrow", 390, "dark", "adaptive", height=1500)
        take(browser, url, kb, "drafts", 390, "light", "speculative-rag", height=1400)
        browser.close()


def take(
    browser: Browser, url: str, kb: str, name: str, width: int, scheme: str, *methods: str, height: int = 0
) -> None:
    """Ask by one or two methods and keep what is seen from the answer on; 0 for the whole height."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("#method-1 option", state="attached")
    page.select_option("#kb", kb)
    for place, method in enumerate(methods, 1):
        page.select_option(f"#method-{place}", method)
    ask(page)
    ask(page)  # the first answer also compiles and measures
    page.mouse.move(0, 0)
    path = FOLDER / f"page-{name}.png"
    page.screenshot(path=path, full_page=True)
    if height:
        whole = page.evaluate("document.documentElement.scrollHeight")
        page.screenshot(
            path=path, full_page=True, clip={"x": 0, "y": 0, "width": width, "height": min(height, whole)}
        )
    context.close()


def ask(page: Page) -> None:
    """Ask, and wait until every answer has ended."""
    page.fill("#question", QUESTION)
    page.click("#submit")
    page.wait_for_selector("#submit", state="visible", timeout=120_000)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "sample")
