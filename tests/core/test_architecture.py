"""The rules that keep the package easy to see: import arrows, public names, file sizes, safe file formats."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import specrag

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "specrag"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# A package imports from its own line and from the lines above it; never in a circle.
LAYERS = (
    ("errors",),
    ("engine",),
    ("models",),
    ("retrieval",),
    ("speculation", "scheduling"),
    ("methods",),
    ("training", "serving", "evaluation", "integrations", "bench", "cli"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Networks run here; everything else works on the toy model without torch.
TORCH_ALLOWED = re.compile(
    r"^(engine/|models/|training/|evaluation/|integrations/|bench/|cli/|retrieval/(encoder|reranker|bert)\.py"
    r"|speculation/drafters/(draft_model|cross_vocabulary|eagle|rag)\.py)"
)
METHOD_FILES = ("plain", "standard_rag", "respec", "rapid", "ralmspec", "knn_lm", "speculative_rag")


def _relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _module_name(path: Path) -> str:
    parts = ("specrag", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _exists(module: str) -> bool:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()


def _imports(path: Path) -> set[str]:
    """Every module that a file imports, also inside functions and for type checking only."""
    found: set[str] = set()
    package = _module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{module}.{alias.name}"
                found.add(whole if module.startswith("specrag") and _exists(whole) else module)
    return found


def _layer_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "specrag"


def _arrows() -> dict[str, dict[str, str]]:
    """The packages that each package imports, with one file that does it."""
    arrows: dict[str, dict[str, str]] = defaultdict(dict)
    for path in SOURCES:
        source = _layer_of(_module_name(path))
        for module in _imports(path):
            if module.split(".")[0] == "specrag" and _layer_of(module) != source:
                arrows[source].setdefault(_layer_of(module), _relative(path))
    return arrows


def test_every_package_has_a_layer() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders <= RANK.keys()


def test_imports_go_one_way() -> None:
    upward = [
        f"{file}: {source} imports {target}"
        for source, targets in _arrows().items()
        for target, file in targets.items()
        if source in RANK and target in RANK and RANK[target] > RANK[source]
    ]
    assert not upward


def test_packages_import_in_no_circle() -> None:
    # The package's own top-level files (the public names) stand between the methods and the programs.
    graph = {source: set(targets) for source, targets in _arrows().items() if source != "__main__"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"packages import each other in a circle: {' -> '.join(error.args[1])}")


def test_methods_do_not_import_each_other() -> None:
    wrong = [
        f"methods/{name}.py imports {module}"
        for name in METHOD_FILES
        if (path := PACKAGE / "methods" / f"{name}.py").exists()
        for module in _imports(path)
        if module.startswith("specrag.methods.") and module.split(".")[2] in METHOD_FILES
    ]
    assert not wrong


def test_torch_is_imported_where_networks_run() -> None:
    others = [path for path in SOURCES if not TORCH_ALLOWED.match(_relative(path))]
    users = [
        path for path in others if {name.split(".")[0] for name in _imports(path)} & {"torch", "transformers"}
    ]
    assert users == []


def test_loops_and_schedules_import_without_torch() -> None:
    modules = [
        _module_name(path)
        for path in SOURCES
        if _relative(path).startswith(("speculation/", "scheduling/")) or _relative(path) == "models/toy.py"
        if not TORCH_ALLOWED.match(_relative(path)) or _relative(path) == "models/toy.py"
    ]
    blocked = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
    code = blocked + "\n".join(f"import {module}" for module in modules)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_are_complete() -> None:
    tree = _parse(PACKAGE / "__init__.py")
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specrag"):
            bound.update(alias.asname or alias.name for alias in node.names)
    bound.update(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    assert {name for name in bound if not name.startswith("_")} <= set(specrag.__all__)
    missing = [name for name in specrag.__all__ if not hasattr(specrag, name)]
    assert not missing


def test_public_names_are_sorted() -> None:
    def key(name: str) -> tuple[int, str]:  # constants, classes, functions: the order of ruff's RUF022
        return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)

    names = list(specrag.__all__)
    assert names == sorted(set(names), key=key)


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if p.name == "__init__.py" and p.parent != PACKAGE], ids=_relative
)
def test_inner_packages_hold_only_a_docstring(path: Path) -> None:
    tree = _parse(path)
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


def test_nothing_is_unpickled() -> None:
    unsafe = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve"}
    for path in SOURCES:
        assert not {module.split(".")[0] for module in _imports(path)} & unsafe, path
        for node in ast.walk(_parse(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load"), f"{path}:{node.lineno}"
            if isinstance(node, ast.keyword):
                assert node.arg not in {"weights_only", "allow_pickle"}, f"{path}:{node.lineno}"


def _text_files() -> list[Path]:
    folders = ("src", "tests", "docs", "scripts", ".ci")
    inside = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    kinds = {".py", ".md", ".sh", ".yml", ".toml", ".txt", ".json", ".jsonl", ".svg", ""}
    top = [path for path in ROOT.iterdir() if path.is_file()]
    return [
        path
        for path in inside + top
        if path.suffix in kinds and "__pycache__" not in path.parts and path.name != ".git"
    ]


def test_no_machine_paths() -> None:
    # Built from parts, so that this file does not hold what it looks for.
    roots = ["/" + "work/", "/" + "root/", "/" + "home/", "/" + "tmp/venv", "/" + "opt/", f"{ROOT}/"]
    pattern = re.compile("|".join(rf"(?<![\w.~}}]){re.escape(root)}" for root in roots))
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in _text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found
