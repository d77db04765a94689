"""A method that another package brings is a method like ours, with nothing of specrag changed.

The package is the one that docs/add-a-method.md shows: ``tests/plugin`` with its own pyproject.toml.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from specrag.methods.registry import GROUP, method_names
from tests.docs.snippets import read_snippets

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCE = HERE / "src" / "first_word_lookup" / "__init__.py"
NAME = "first-word-lookup"

#: What Python, the command line and others are asked, and what they have to say.
PLACES = {
    "the list of names": (
        ["-c", "from specrag.methods.registry import method_names; print(*method_names())"],
        NAME,
    ),
    "a call": (
        [
            "-c",
            "import specrag; llm = specrag.load('smollm2-135m', dtype='fp32', device='cpu')\n"
            "call = {'prompt': 'red green blue, red green blue, red green', 'raw': True, 'max_tokens': 12}\n"
            f"made = llm.generate(method='{NAME}', **call)\n"
            "assert made.text == llm.generate(method='plain', **call).text\n"
            "print(*made.usage.accepted_by)",
        ],
        "first-word",
    ),
    "its options": (
        [
            "-c",
            "from specrag.methods.registry import make_method\n"
            f"print(make_method('{NAME}', {{'most': 9}}).options.most)",
        ],
        "9",
    ),
    "the command line's list": (["-m", "specrag", "methods", NAME], "most"),
    "the command line": (
        [
            *("-m", "specrag", "generate", "red green blue, red green blue, red green", "--raw", "-m", NAME),
            *("-o", "most=4", "--max-tokens", "12", "-o", "dtype=fp32", "-o", "device=cpu", "--json"),
        ],
        '"first-word"',
    ),
    "the server": (["-m", "tests.plugin.over_http"], "listed, described, answered, counted"),
    "the bench": (
        [
            "-c",
            "from benchmarks.tokens import subjects\nfrom specrag.bench.measurement import check_method\n"
            f"assert '{NAME}' in subjects.all_of('smollm2-135m')\nprint(check_method('{NAME}'))",
        ],
        NAME,
    ),
    "the bench's command": (
        [
            *("-m", "specrag", "bench", "tokens", "--quick", "--no-plots", "--json", "-", "--out", "OUT"),
            *("--rows", "1", "--task", "summarization", "--method", NAME),
        ],
        '"acceptance_by_source": {"first-word": ',
    ),
    "a wrong option": (
        [
            "-c",
            "from specrag.errors import InputError\nfrom specrag.methods.registry import make_method\n"
            f"try: make_method('{NAME}', {{'most': 99}})\nexcept InputError as error: print(error)",
        ],
        "give a whole number from 1 to 32",
    ),
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the package as an installer leaves it."""
    project = tmp_path_factory.mktemp("project") / "plugin"
    shutil.copytree(HERE, project, ignore=shutil.ignore_patterns("__pycache__", "test_*"))
    target = tmp_path_factory.mktemp("target")
    if find_spec("hatchling") is not None and find_spec("pip") is not None:
        words = [
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--no-build-isolation",
            "--target",
            str(target),
        ]
        subprocess.run([sys.executable, "-m", "pip", *words, str(project)], check=True, timeout=240)
    else:  # without a build backend: what it would write
        shutil.copytree(project / "src" / SOURCE.parent.name, target / SOURCE.parent.name)
        read = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        told = target / f"first_word_lookup-{read['version']}.dist-info"
        told.mkdir()
        (told / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {read['name']}\nVersion: {read['version']}\n", encoding="utf-8"
        )
        entries = "".join(f"{name} = {value}\n" for name, value in read["entry-points"][GROUP].items())
        (told / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}", encoding="utf-8")
    return target


@pytest.mark.parametrize("place", PLACES)
def test_it_is_found(installed: Path, smollm2: Path, place: str, tmp_path: Path) -> None:
    words, said = PLACES[place]
    words = [str(tmp_path) if word == "OUT" else word for word in words]
    paths = [str(installed), str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_it_is_not_there_without_being_installed() -> None:
    assert NAME not in method_names()


def test_the_guide_shows_this_package() -> None:
    shown = [snippet.code for snippet in read_snippets(ROOT / "docs" / "add-a-method.md")]
    assert SOURCE.read_text(encoding="utf-8") in shown
    entry = (HERE / "pyproject.toml").read_text(encoding="utf-8").partition("[project.entry-points")[2]
    assert any(f"[project.entry-points{entry.partition('[tool')[0].rstrip()}" in code for code in shown)
