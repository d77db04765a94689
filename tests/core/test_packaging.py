"""What is installed: the wheel, its base, and what is said where an extra is missing."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import specrag
from specrag.errors import SpecragError
from specrag.extras import PACKAGES, MissingPackage, missing, needed_by

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "specrag"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
MOST = 12
IMAGE = ("local", "serve", "stores", "tracing")

# What drafts with networks belongs to the extra `local`.
NETWORKS = re.compile(r"drafters\.(draft_model|cross_vocabulary|eagle|rag)\b")


def _names(requirements: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in requirements}


def _brought(requirements: Iterable[str]) -> set[str]:
    """The distributions, and those that come by the extras asked of them: ``psycopg[pool]`` brings psycopg-pool."""
    found = _names(requirements)
    for requirement in map(Requirement, requirements):
        for line in metadata.requires(requirement.name) or () if requirement.extras else ():
            further = Requirement(line)
            if further.marker and any(
                further.marker.evaluate({"extra": extra}) for extra in requirement.extras
            ):
                found.add(canonicalize_name(further.name))
    return found


def test_the_base_is_small_and_its_bounds_are_wide() -> None:
    base = {Requirement(line).name: Requirement(line) for line in PROJECT["dependencies"]}
    assert len(base) <= MOST
    assert base["numba"].specifier.contains("0.61.0")
    assert base["numba"].specifier.contains("0.99.0")
    assert base["numpy"].specifier.contains("2.0.0")
    assert not {"torch", "transformers", "faiss-cpu"} & base.keys()


def test_every_package_of_an_extra_is_known_by_the_name_it_is_imported_by() -> None:
    brings = {
        module: {canonicalize_name(name) for name in names}
        for module, names in metadata.packages_distributions().items()
    }
    known: set[str] = set().union(
        *(brings.get(package, set()) for names in PACKAGES.values() for package in names)
    )
    base = _names(PROJECT["dependencies"])
    for extra, packages in PACKAGES.items():
        if not brings.keys() & packages:  # nothing of it is installed here
            continue
        wanted, brought = _names(EXTRAS[extra]), _brought(EXTRAS[extra])
        assert not [package for package in packages if package in brings and not brings[package] & brought], (
            extra
        )
        installed = {name for names in brings.values() for name in names} & wanted
        assert installed - known <= base, f"what {extra} brings, but under which name is it imported?"


def test_the_error_names_the_extra() -> None:
    with (
        pytest.raises(
            MissingPackage, match=r"^load: torch is not installed; install specrag\[local\]$"
        ) as caught,
        needed_by("load"),
    ):
        raise ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")
    assert isinstance(caught.value, SpecragError)
    assert caught.value.name == "torch"
    assert str(missing("bench", "matplotlib", "bench")).endswith("install specrag[bench]")
    assert missing("x", "specrag.nowhere") is None
    with pytest.raises(ModuleNotFoundError, match="nowhere"), needed_by("x"):
        raise ModuleNotFoundError("No module named 'nowhere'", name="nowhere")


def test_public_names_are_those_of_the_type_checker() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    typed = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specrag.")
        for alias in node.names
    }
    typed.pop("needed_by")
    assert typed == specrag._MODULES
    assert set(typed) == set(specrag.__all__)
    assert set(specrag.__all__) <= set(dir(specrag))
    with pytest.raises(AttributeError, match="Nothing"):
        _ = specrag.Nothing


def _base_distributions() -> set[str]:
    """The base's dependencies and theirs, as far as this environment needs them."""
    found: set[str] = set()
    wanted = [Requirement(line) for line in PROJECT["dependencies"]]
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        extras = requirement.extras or {""}
        if name in found:
            continue
        found.add(name)
        for line in metadata.requires(name) or ():
            further = Requirement(line)
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras):
                wanted.append(further)
    return found


@pytest.fixture(scope="module")
def only_base() -> str:
    """Code that hides every installed package that the base does not bring."""
    base = _base_distributions() | {"specrag", "pip", "setuptools"}
    hidden = sorted(
        module
        for module, names in metadata.packages_distributions().items()
        if not {canonicalize_name(name) for name in names} & base
    )
    assert "torch" in hidden
    assert "numpy" not in hidden
    return f"import sys; sys.modules.update(dict.fromkeys({hidden!r}))\n"


def _python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_speculation_runs_on_the_base_alone(only_base: str) -> None:
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((PACKAGE / "speculation").rglob("*.py"))
    ]
    modules = [module for module in modules if not NETWORKS.search(module)]
    assert len(modules) > 10
    done = _python(only_base + "".join(f"import {module}\n" for module in modules))
    assert done.returncode == 0, done.stderr


COMMAND = "from specrag.cli.main import main; main()"


def test_the_command_line_runs_on_the_base_alone(only_base: str) -> None:
    done = _python(only_base + COMMAND, "--help")
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout
    for words, extra in (
        (["generate", "Hello", "--model", "smollm2-135m"], "local"),
        (["index", str(ROOT / "docs"), "--kb", os.devnull], "local"),
        (["serve", "--list-settings"], "serve"),
    ):
        done = _python(only_base + COMMAND, *words)
        assert done.returncode == 1, done.stdout
        assert re.fullmatch(
            rf"error: {words[0]}: \w+ is not installed; install specrag\[{extra}\]\n", done.stderr
        ), done.stderr


def test_the_public_names_say_what_they_need(only_base: str) -> None:
    code = "import specrag\nprint(specrag.SpecragError.__name__)\ntry:\n    specrag.KnowledgeBase\n"
    done = _python(f"{only_base}{code}except specrag.SpecragError as error:\n    print(error)\n")
    assert done.returncode == 0, done.stderr
    name, message = done.stdout.splitlines()
    assert name == "SpecragError"
    assert re.fullmatch(r"KnowledgeBase: \w+ is not installed; install specrag\[local\]", message)


def _least_seconds(*commands: tuple[str, ...]) -> list[float]:
    """Processor time of each, code and its words, the best of ten: what else the machine does shows in it least.

    They take turns, so that a busy moment slows all of them.
    """
    timed = "import sys, time, atexit; atexit.register(lambda: print(time.process_time(), file=sys.stderr))\n"
    runs = [[_python(timed + code, *words) for code, *words in commands] for _ in range(10)]
    assert all(run.returncode == 0 for turn in runs for run in turn), runs[0]
    return [min(float(run.stderr.splitlines()[-1]) for run in each) for each in zip(*runs, strict=True)]


def test_importing_is_quick_and_brings_no_network() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'numba', 'pydantic', 'typer'}"
    (library,) = _least_seconds((f"import specrag; assert not {heavy} & set(sys.modules)",))
    assert library < 0.15
    heavy = "{'torch', 'transformers', 'numba', 'numpy'}"
    code = f"atexit.register(lambda: {heavy} & set(sys.modules) and print('heavy'))\n{COMMAND}"
    assert "heavy" not in _python(f"import atexit, sys\n{code}", "--help").stdout
    # On a slow processor: three times what the command line's own libraries take there.
    command, own = _least_seconds((COMMAND, "--help"), ("import typer.rich_utils, rich.markdown, pydantic",))
    assert command < max(0.4, 3 * own)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (about,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        fields = Parser().parsestr(archive.read(about).decode())
    assert {name.split("/")[0] for name in names} == {"specrag", about.split("/")[0]}
    assert "specrag/py.typed" in names
    assert not [name for name in names if "/suites/" in name or "benchmarks" in name or "recipes" in name]
    requirements = [Requirement(line) for line in fields.get_all("Requires-Dist", [])]
    assert len([line for line in requirements if line.marker is None]) <= MOST
    assert set(fields.get_all("Provides-Extra", [])) == set(EXTRAS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_alone_can_be_installed_and_asked_for_help(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    constraints = [f"--constraint={ROOT / 'constraints.txt'}"]
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", *constraints, str(wheel)]
    done = subprocess.run(pip, env=clean, capture_output=True, text=True, check=False)
    if done.returncode and re.search(
        "Could not find a version|connection|resolve", done.stderr, re.IGNORECASE
    ):
        pytest.skip("no package registry can be reached")
    assert done.returncode == 0, done.stderr
    for words, begins in (
        (["python", "-c", "import specrag; print(specrag.__all__)"], "['RAPID'"),
        (["specrag", "--version"], "specrag "),
        (["specrag", "--help"], ""),
    ):
        words[0] = str(environment / "bin" / words[0])
        said = subprocess.run(words, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stderr
        assert said.stdout.startswith(begins)
    bench = [str(environment / "bin" / "specrag"), "bench", "engine"]
    said = subprocess.run(bench, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
    assert said.returncode == 1
    assert "from a clone of the repository" in said.stderr


def test_the_release_workflow_is_one() -> None:
    words = ["--builtin-schema", "vendor.github-workflows", ".github/workflows/release.yml"]
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_image_is_locked_to_the_versions_of_the_constraints() -> None:
    known = {canonicalize_name(name): version for name, version in _pins("constraints.txt")}
    locked = {canonicalize_name(name): version for name, version in _pins("requirements.lock")}
    torch = canonicalize_name("torch")
    assert locked.pop(torch) == known[torch] + "+cpu"  # its plain build brings gigabytes for GPUs
    assert not {name for name, version in locked.items() if known.get(name, version) != version}
    brought = _names([*PROJECT["dependencies"], *(line for extra in IMAGE for line in EXTRAS[extra])])
    assert brought - {torch} <= locked.keys()
    (steps,) = re.findall(r"pip install --require-hashes[^&]*?\n(?! )", (ROOT / "Dockerfile").read_text())
    assert "--requirement requirements.lock" in steps
    text = (ROOT / "requirements.lock").read_text()
    assert "://" not in text, "packages come from the registry that the builder has set"
    assert all("--hash=sha256:" in entry for entry in re.split(r"(?m)^[\w.-]+==", text)[1:])


def _pins(name: str) -> list[tuple[str, str]]:
    return re.findall(r"(?m)^([\w.-]+)==([^\s;]+)", (ROOT / name).read_text())
