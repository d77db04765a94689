"""The script that draws the terminal picture of the README."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]


def _record(picture: Path, *command: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "scripts" / "record_terminal.py"
    return subprocess.run(
        [sys.executable, str(script), str(picture), "--", *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _words(picture: Path) -> str:
    tree = ElementTree.parse(picture)
    texts = [element.text or "" for element in tree.iter("{http://www.w3.org/2000/svg}text")]
    return " ".join(texts).replace("\xa0", " ")


def test_picture_shows_command_and_output(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "picture.svg"
    done = _record(picture, sys.executable, "-c", "print('copper'); print('half\\rdone')")
    assert done.returncode == 0, done.stderr
    words = _words(picture)
    assert "copper" in words
    assert "done" in words
    assert "half" not in words.split("copper")[-1]  # overwritten in the terminal, as a progress bar is
    assert "font-face" not in picture.read_text(encoding="utf-8")


def test_failed_command_leaves_no_picture(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    done = _record(picture, sys.executable, "-c", "raise SystemExit(3)")
    assert done.returncode != 0
    assert "exit code 3" in done.stderr
    assert not picture.exists()


def test_rows_appear_when_they_were_printed(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    code = "import time; print('at once', flush=True); time.sleep(0.6); print('later', flush=True)"
    done = _record(picture, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    tree = ElementTree.parse(picture)
    svg = "{http://www.w3.org/2000/svg}"
    begins = [
        float(one.attrib["keyTimes"].split(";")[1]) * float(one.attrib["dur"].removesuffix("s"))
        for one in tree.iter(f"{svg}animate")
    ]
    typed, first, last = begins[0], begins[-2], begins[-1]
    assert typed == 0 < first
    assert 0.5 < last - first < 5
