"""The page's tests: a real server with SmolLM2 and a real knowledge base, driven through a real headless Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.sample import build_sample
from tests.serving.page.live import LiveServer, serve

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


# Playwright keeps an event loop running in this thread, in which no other test could start one of its own: both end
# with the module.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Give Debian's Chromium, headless (scripts/install_browser.sh installs it)."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no chromium here; scripts/install_browser.sh installs it")
    with sync_api.sync_playwright() as playwright:
        # Root has no sandbox of its own, and containers have a small /dev/shm.
        arguments = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(browser: Browser, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Give a server on a free port with the knowledge base ``sample``; uploads make others."""
    folder = tmp_path_factory.mktemp("page")
    kb = build_sample(folder / "sample")
    (folder / "made").mkdir()
    with serve(kbs={"sample": kb}, kb_root=folder / "made") as server:
        yield server


class Visit:
    """A browser's window at the page; what its console complains of is kept."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self._heard(message.type, message.text))

    def _heard(self, kind: str, text: str) -> None:
        # Chromium reports every answer of status 400 and above; whether one was right is the test's business.
        if kind in {"error", "warning"} and not text.startswith("Failed to load resource"):
            self.complaints.append(text)

    def choose(self, method: str, other: str = "", *, kb: str | None = "sample", **settings: str) -> None:
        """Fill the form, by the settings' names."""
        page = self.page
        page.locator("#choices").evaluate("details => details.open = true")
        if kb is not None:
            page.select_option("#kb", kb)
        page.select_option("#method-1", method)
        page.select_option("#method-2", other)
        if settings and not page.locator("#settings").get_attribute("open"):
            page.locator("#settings").evaluate("details => details.open = true")
        for name, value in settings.items():
            page.fill(f"#setting-{name}", value)

    def ask(self, question: str) -> dict[str, Any]:
        """Ask, and wait until every answer has ended; what the first request sent."""
        page = self.page
        page.fill("#question", question)
        with page.expect_request("**/v1/chat/completions") as asked:  # the buttons have changed by then
            page.press("#question", "Enter")
        page.wait_for_selector("#submit", state="visible", timeout=60_000)
        return dict(asked.value.post_data_json or {})

    def last(self, selector: str) -> Locator:
        """What the newest turn of the conversation holds."""
        return self.page.locator(f".turn:last-child {selector}")


@pytest.fixture
def visit(browser: Browser, server: LiveServer) -> Iterator[Callable[..., Visit]]:
    """Open the page in a fresh profile: ``visit(width=1280, scheme="light")``; nothing may appear in its console."""
    visits: list[Visit] = []

    def visit(
        width: int = 1280, height: int = 900, scheme: Any = "light", url: str | None = None, **options: Any
    ) -> Visit:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, **options
        )
        visits.append(Visit(context.new_page()))
        visits[-1].page.goto(url or server.url)
        if url is None:
            visits[-1].page.wait_for_selector("#method-1 option", state="attached")
        return visits[-1]

    yield visit
    for each in visits:
        each.page.context.close()
    assert [complaint for each in visits for complaint in each.complaints] == []
