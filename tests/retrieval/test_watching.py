"""Following a folder: what counts as a change, and when."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from specrag.retrieval.watching import look, settled_changes


class Enough(Exception):  # noqa: N818 - ends a loop that has no end
    """No more waits."""


def test_a_change_is_told_once_when_it_has_settled(tmp_path: Path) -> None:
    folder = tmp_path / "library"
    folder.mkdir()
    note = folder / "note.txt"

    def nothing() -> None:
        return

    events: list[str] = []
    script: list[Callable[[], object]] = [
        nothing,
        partial(note.write_text, "a"),  # half written
        partial(note.write_text, "ab"),
        nothing,  # settled: told
        nothing,
        (folder / "kb").mkdir,
        partial((folder / "kb" / "x.txt").write_text, "of the knowledge base"),
        note.unlink,
        nothing,  # told
        nothing,
    ]
    steps = iter(script)

    def wait(seconds: float) -> None:
        assert seconds == 0.5
        step = next(steps, None)
        if step is None:
            raise Enough
        step()
        events.append("look")

    def follow() -> None:
        for _ in settled_changes([folder], folder / "kb", look([folder], folder / "kb"), 0.5, wait):
            events.append("change")

    with pytest.raises(Enough):
        follow()
    assert events == [
        *["look"] * 4,
        "change",
        *["look"] * 5,
        "change",
        "look",
    ]


def test_a_folder_that_goes_and_comes_back_is_followed(tmp_path: Path) -> None:
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "note.txt").write_text("one")
    away = tmp_path / "away"
    steps: list[Callable[[], object]] = [
        lambda: folder.rename(away),
        lambda: None,
        lambda: away.rename(folder),
        lambda: (folder / "note.txt").write_text("other"),
        lambda: None,
    ]
    changes = 0

    def wait(_: float) -> None:
        if not steps:
            raise Enough
        steps.pop(0)()

    def follow() -> None:
        nonlocal changes
        for _ in settled_changes([folder], tmp_path / "kb", look([folder], tmp_path / "kb"), 1.0, wait):
            changes += 1

    with pytest.raises(Enough):
        follow()
    assert changes == 2
