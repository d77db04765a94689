"""README's figures and those of the results are those of the committed records, with their share of equal texts."""

from __future__ import annotations

import gzip
import re
from functools import cache
from pathlib import Path

import pytest

from specrag.bench.measurement import Measurement, from_json_lines

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
RECORDS = RESULTS / "records"
PAGES = sorted(RESULTS.glob("*.md"))

#: What is no list of measurements: rows to train on.
OTHERS = {"drafter-rows"}

#: Rows of README's table whose page has measurements of their own: record, task and method.
ROWS = {
    "adaptive": ("tokens-smollm2-amx", "overall", "adaptive"),
    "ReSpec": ("tokens-smollm2-amx", "overall", "respec"),
}
#: Other figures of README's first row.
BESIDE = (("tokens-smollm2-amx", "overall", "adaptive+eagle-2"), ("tokens-qwen-amx", "overall", "adaptive"))


def table(text: str, heading: str) -> list[list[str]]:
    """The cells of the table with this heading."""
    lines = text[text.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@cache
def measurements(record: str) -> tuple[Measurement, ...]:
    """Of a record in ``docs/results/records``, by its name without endings."""
    packed = (RECORDS / f"{record}.jsonl.gz").read_bytes()
    return tuple(from_json_lines(gzip.decompress(packed).decode("utf-8")))


def measured(record: str, task: str, method: str, baseline: str) -> Measurement | None:
    mine = [
        entry
        for entry in measurements(record)
        if (entry.task, entry.method, entry.baseline) == (task, method, baseline)
    ]
    return mine[0] if mine else None


def told(entry: Measurement) -> str:
    """A ratio as pages write it."""
    return f"{entry.speedup:.2f} ({entry.speedup_low:.2f} to {entry.speedup_high:.2f})"


def named(page: Path) -> set[str]:
    """The records that a page links to."""
    return set(re.findall(r"\(records/([\w-]+)\.jsonl\.gz\)", page.read_text(encoding="utf-8")))


def name_of(page: Path) -> str:
    return page.name


README = table((ROOT / "README.md").read_text(encoding="utf-8"), "| method | what it gives |")


@pytest.mark.parametrize("row", README, ids=lambda row: row[0].split("*")[2])
def test_readmes_figures_stand_on_the_page_that_they_link_to(row: list[str]) -> None:
    figures = re.findall(r"\[([^]]+)\]\(docs/results/([\w-]+\.md)\)", row[1])
    for figure, page in figures:
        text = " ".join((RESULTS / page).read_text(encoding="utf-8").split())
        assert set(re.findall(r"\d+\.\d+", figure)) <= set(re.findall(r"\d+\.\d+", text))
        if "(" in figure:
            assert figure in text
    if name := next((name for name in ROWS if f"**{name}**" in row[0]), None):
        entry = measured(*ROWS[name], "plain")
        assert entry is not None
        assert entry.identical is not None
        assert figures[0][0] == told(entry)
        assert row[2:4] == [str(entry.n), f"{entry.identical:.0%}".replace("%", " %")]


def test_every_row_of_readme_tells_its_texts() -> None:
    assert len(README) == 8
    assert all(re.fullmatch(r"\d+ %|approximate", row[3]) for row in README)
    assert sum(f"**{name}**" in row[0] for row in README for name in ROWS) == len(ROWS)


def test_the_first_row_has_the_figures_of_qwen_and_of_the_head() -> None:
    entries = [measured(*one, "plain") for one in BESIDE]
    assert all(entry is not None and f"[{entry.speedup:.2f}]" in README[0][1] for entry in entries)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_ratios_of_a_page_stand_in_the_records_that_it_names(page: Path) -> None:
    text = " ".join(page.read_text(encoding="utf-8").split())
    found = set(re.findall(r"\d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\)", text))
    known = {
        told(entry)
        for record in named(page) - OTHERS
        for entry in measurements(record)
        if entry.speedup is not None and entry.speedup_low is not None and not entry.above_ceiling
    }
    assert found <= known


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_no_method_can_reach_is_marked(page: Path) -> None:
    impossible = [
        entry for record in named(page) - OTHERS for entry in measurements(record) if entry.above_ceiling
    ]
    text = " ".join(page.read_text(encoding="utf-8").split())
    stated = re.findall(r"(\d+) ratios of th\w+ records? .{0,20}are above their ceiling", text)
    assert stated == ([str(len(impossible))] if impossible else [])
    assert ("measurement errors" in text) == bool(impossible)


def test_every_record_is_named_by_a_page() -> None:
    kept = {path.name.removesuffix(".jsonl.gz") for path in RECORDS.iterdir()}
    assert kept == set().union(*map(named, PAGES))
