"""The log of experiments: short notes with a date, each on the index once, under its own title."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

INDEX = Path(__file__).resolve().parents[2] / "docs" / "log" / "README.md"
NOTES = sorted(path for path in INDEX.parent.iterdir() if path != INDEX)


def _name(note: Path) -> str:
    return note.name


def _title(note: Path) -> str:
    first = note.read_text(encoding="utf-8").split("\n", 1)[0]
    assert first.startswith("# "), f"{note.name} does not begin with its title"
    return first.removeprefix("# ")


def _listed() -> list[list[str]]:
    """The lines of each of the index's groups."""
    groups = INDEX.read_text(encoding="utf-8").split("\n## ")[1:]
    return [[line for line in group.splitlines() if line.startswith("- ")] for group in groups]


def test_every_note_is_listed_once_under_its_title() -> None:
    listed = sorted(line for group in _listed() for line in group)
    assert listed == sorted(f"- {note.name[:10]} [{_title(note)}]({note.name})" for note in NOTES)


def test_newest_notes_stand_first() -> None:
    for group in _listed():
        dates = [line[2:12] for line in group]
        assert dates == sorted(dates, reverse=True)


def test_no_two_notes_have_the_same_title() -> None:
    notes = defaultdict(list)
    for note in NOTES:
        notes[_title(note).casefold()].append(note.name)
    assert [names for names in notes.values() if len(names) > 1] == []


@pytest.mark.parametrize("note", NOTES, ids=_name)
def test_note_is_short_and_dated(note: Path) -> None:
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}-[a-z0-9]+(-[a-z0-9]+)*\.md", note.name)
    assert len(note.read_text(encoding="utf-8").split()) <= 300


@pytest.mark.parametrize("note", NOTES, ids=_name)
def test_links_of_a_note_lead_somewhere(note: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", note.read_text(encoding="utf-8"))
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [target for target in local if not (note.parent / target).exists()] == []
