"""The API reference shows every public name, once."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import specrag

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "reference").glob("*.md"))


def test_every_public_name_is_on_one_page() -> None:
    shown = Counter(
        name for page in PAGES for name in re.findall(r"(?m)^::: specrag\.(\w+)$", page.read_text())
    )
    assert shown == Counter(specrag.__all__)
