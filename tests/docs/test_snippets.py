"""Runs what README and guides show.

`python` blocks of one page run in order in one namespace; `bash` blocks run in a shell where `specrag` is
this checkout. `sh` blocks (set-up, and what takes minutes) are shown, not run: their make targets and
commands are checked to exist. Every block must name one of the known languages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from specrag.cli import main as frame
from tests.docs.snippets import Snippet, read_snippets

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "results" not in path.parts),
]
SHOWN_ONLY = {"sh", "text", "json", "toml"}


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _blocks(page: Path, language: str) -> list[Snippet]:
    return [snippet for snippet in read_snippets(page) if snippet.language == language]


def _pages_with(language: str) -> list[Path]:
    return [page for page in PAGES if _blocks(page, language)]


@pytest.fixture
def shell(tmp_path: Path, model_home: Path) -> dict[str, str]:
    """An environment whose `specrag` and `python` are this checkout's."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, words in {"specrag": " -m specrag", "python": ""}.items():
        tool = tools / name
        tool.write_text(f'#!/bin/sh\nexec "{sys.executable}"{words} "$@"\n', encoding="utf-8")
        tool.chmod(0o755)
    return {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize("page", _pages_with("python"), ids=_name)
def test_python_blocks_run(
    page: Path, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.name == "stores.md" and find_spec("pgserver") is None:
        pytest.skip("pgserver has no wheel for this Python or this machine")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for snippet in _blocks(page, "python"):
        padded = "\n" * (snippet.line - 1) + snippet.code  # a failure names the page's own line
        exec(compile(padded, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", _pages_with("bash"), ids=_name)
def test_bash_blocks_run(page: Path, smollm2: Path, tmp_path: Path, shell: dict[str, str]) -> None:
    for snippet in _blocks(page, "bash"):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", snippet.code],
            cwd=tmp_path,
            env=shell,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{_name(page)}:{snippet.line}: {done.stderr}"
        assert done.stdout.strip(), f"{_name(page)}:{snippet.line} printed nothing"


def test_shown_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.M))
    wrong = []
    for page in PAGES:
        for snippet in _blocks(page, "sh"):
            for line in snippet.code.splitlines():
                words = line.split("#")[0].split()
                if words[:1] == ["make"] and words[1] not in targets:
                    wrong.append(f"{_name(page)}: {line}")
                if words[:1] == ["specrag"] and words[1] not in frame.COMMANDS:
                    wrong.append(f"{_name(page)}: {line}")
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_block_has_a_known_language(page: Path) -> None:
    languages = {snippet.language for snippet in read_snippets(page)}
    assert languages <= {"python", "bash"} | SHOWN_ONLY


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    missing = [target for target in local if not (page.parent / target).exists()]
    assert not missing


def test_readme_shows_the_two_commands() -> None:
    shown = "\n".join(snippet.code for snippet in _blocks(ROOT / "README.md", "sh"))
    assert "make demo" in shown
    assert "make test" in shown
