"""The rules that keep the package easy to see: import arrows, public names, safe file formats."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import specrag
from specrag.extras import MissingPackage

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "specrag"
SOURCES = sorted(PACKAGE.rglob("*.py"))
# Beside the package, not in the wheel: they import specrag, and it imports them by name alone, when asked to.
BESIDE = sorted(path for folder in ("benchmarks", "recipes") for path in (ROOT / folder).rglob("*.py"))

# A package imports from its own line and from the lines above it; never in a circle.
LAYERS = (
    ("errors", "lazy", "extras", "openmp"),
    ("checks",),
    ("artifacts",),
    ("engine",),
    ("models",),
    ("retrieval",),
    ("speculation",),
    ("methods",),
    ("training", "serving", "integrations", "bench", "cli"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Networks run here; everything else works on the toy model without torch.
TORCH_ALLOWED = re.compile(
    r"^(engine/|models/|training/|integrations/|bench/|cli/|retrieval/encoder/(encoder|reranker|bert)\.py)"
)
METHODS = (
    "plain",
    "adaptive",
    "baselines",
    "standard_rag",
    "respec",
    "rapid",
    "ralmspec",
    "knn_lm",
    "speculative_rag",
)


def _relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT if path in BESIDE else PACKAGE.parent).with_suffix("").parts
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


#: What other packages import by file: parts of compiled loops, of which several have one name, and functions named as
#: their file.
BY_FILE = ("specrag.engine.cpu", "specrag.engine.compiling", "specrag.cli.main")
LIKE_THEIR_FILE = {
    "specrag.methods.small_talk",
    "specrag.methods.wording",
    "specrag.retrieval.build",
    "specrag.speculation.decode",
}


def test_packages_are_imported_by_their_faces() -> None:
    """So that a file can move within its package. A method's folder holds the method in place of names."""
    methods = {f"specrag.methods.{name}" for name in METHODS}
    wrong = [
        f"{_relative(path)} imports {module}"
        for path in SOURCES
        for module in _imports(path)
        if module.startswith("specrag.")
        and _layer_of(module) != _layer_of(_module_name(path))
        and module.count(".") > 1
        and not PACKAGE.joinpath(*module.split(".")[1:]).is_dir()
        and not module.startswith(BY_FILE)
        and module not in LIKE_THEIR_FILE
        and module.rpartition(".")[0] not in methods
    ]
    assert not wrong


def test_methods_do_not_import_each_other() -> None:
    found = {name: list((PACKAGE / "methods").glob(f"{name}.py")) for name in METHODS}
    found = {
        name: files or sorted((PACKAGE / "methods" / name).rglob("*.py")) for name, files in found.items()
    }
    assert all(found.values())
    wrong = [
        f"{_relative(path)} imports {module}"
        for name, files in found.items()
        for path in files
        for module in _imports(path)
        if module.startswith("specrag.methods.")
        if (other := module.split(".")[2]) in METHODS and other != name
    ]
    assert not wrong


def test_torch_is_imported_where_networks_run() -> None:
    others = [path for path in SOURCES if not TORCH_ALLOWED.match(_relative(path))]
    users = [
        path for path in others if {name.split(".")[0] for name in _imports(path)} & {"torch", "transformers"}
    ]
    assert users == []


# Of the models, what needs torch at once: networks and their kernels. Names, files, texts and endpoints do not.
TORCH_AT_IMPORT = re.compile(
    r"^models/(decoder|eagle_head|fused_layers|int8_outputs|int8_product|int8_rows|linear|logits|row_ops|tile_linear|transformers)\.py$"
)


def test_the_bottom_imports_nothing_heavy() -> None:
    code = "import sys\nfor name in ('torch', 'numba', 'numpy', 'transformers'): sys.modules[name] = None\n"
    # By path, since the package itself may import more.
    code += f"import types; p = types.ModuleType('specrag'); p.__path__ = [{str(PACKAGE)!r}]\n"
    code += "sys.modules['specrag'] = p\nimport specrag.errors, specrag.checks, specrag.artifacts"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_all_but_networks_imports_without_torch() -> None:
    modules = [
        _module_name(path)
        for path in SOURCES
        if _relative(path).startswith(("speculation/", "models/"))
        if not (TORCH_AT_IMPORT if _layer_of(_module_name(path)) == "models" else TORCH_ALLOWED).match(
            _relative(path)
        )
    ]
    assert "specrag.models.toy" in modules
    blocked = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
    code = blocked + "\n".join(f"import {module}" for module in modules)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_not_installed_is_imported_only_where_it_is_used() -> None:
    """The wheel lacks the folders beside ``src``: a command that needs one imports it itself, and can say so."""
    for path in SOURCES:
        for node in _parse(path).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"recipes", "benchmarks"}, path


def test_public_names_are_complete() -> None:
    tree = _parse(PACKAGE / "__init__.py")
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specrag"):
            bound.update(alias.asname or alias.name for alias in node.names)
    bound.update(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    bound.discard("needed_by")  # the package's own helper, imported inside a function
    assert {name for name in bound if not name.startswith("_")} <= set(specrag.__all__)
    missing = [name for name in specrag.__all__ if not hasattr(specrag, name)]
    assert not missing


def test_public_names_are_sorted() -> None:
    def key(name: str) -> tuple[int, str]:  # constants, classes, functions: the order of ruff's RUF022
        return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)

    names = list(specrag.__all__)
    assert names == sorted(set(names), key=key)


FACES = [
    path
    for path in SOURCES
    if path.name == "__init__.py" and path.parent != PACKAGE
    if path.parent.parent.name != "methods"  # these hold their method
]


@pytest.mark.parametrize("path", FACES, ids=_relative)
def test_inner_packages_hold_only_a_docstring_and_their_names(path: Path) -> None:
    """Plain imports, or those of a block that ``lazy_names`` reads."""
    tree = _parse(path)
    assert ast.get_docstring(tree)
    for node in tree.body[1:]:
        lazily = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        names = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        assert isinstance(node, ast.ImportFrom) or lazily or names, ast.unparse(node)


@pytest.mark.parametrize("path", FACES, ids=_relative)
def test_inner_packages_export_what_they_import(path: Path) -> None:
    module = importlib.import_module(_module_name(path))
    exported = getattr(module, "__all__", [])
    nodes = [node for node in ast.walk(_parse(path)) if isinstance(node, ast.ImportFrom)]
    own = [node for node in nodes if (node.module or "").startswith(_module_name(path))]
    assert set(exported) == {alias.name for node in own for alias in node.names}
    for name in exported:
        try:
            assert getattr(module, name) is not None
        except MissingPackage as error:
            pytest.skip(str(error))
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_this_name'"):
        _ = module.nothing_of_this_name


def test_nothing_is_unpickled() -> None:
    unsafe = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve"}
    for path in SOURCES + BESIDE:
        assert not {module.split(".")[0] for module in _imports(path)} & unsafe, path
        for node in ast.walk(_parse(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load"), f"{path}:{node.lineno}"
            if isinstance(node, ast.keyword):
                assert node.arg not in {"weights_only", "allow_pickle"}, f"{path}:{node.lineno}"


def _text_files() -> list[Path]:
    folders = ("src", "benchmarks", "recipes", "tests", "docs", "scripts", ".ci", ".github")
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
