"""The page of all options says what the methods' classes say."""

from __future__ import annotations

from scripts.method_options import PAGE, page


def test_the_page_of_options_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python scripts/method_options.py"
