"""The rules of the layout: what may import what, and what every file must satisfy."""

from __future__ import annotations

import ast
import fnmatch
import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from fx_fusion.report import REMEDIES, Reason

ROOT = Path(__file__).resolve().parents[1]

#: The lowest layer: data and small services that import nothing of ours but each other.
LEAVES = frozenset(
    f"fx_fusion.{name}"
    for name in (
        "compat",
        "compiled",
        "errors",
        "graph_text",
        "record",
        "report",
        "report_files",
        "report_page",
        "report_repro",
        "report_style",
        "report_svg",
        "report_text",
        "settings",
        "switch",
        "trace",
    )
)
#: These need the standard library alone, so that a report can be read without torch.
TORCH_FREE = frozenset(
    f"fx_fusion{name}"
    for name in (
        *("", ".passes", ".lowering", ".errors", ".settings"),
        *(".report", ".report_files", ".report_text"),
    )
)
#: What may be known of the hardware side elsewhere: the op, the decision, the norm as data, the
#: name of a device's architecture, what kernels need of a machine, and how Inductor is told of the
#: op. Never a kernel, never a workspace.
DOORS = frozenset(
    f"fx_fusion.lowering{name}"
    for name in (
        "",
        ".arch",
        ".gpu_select",
        ".inductor",
        ".norm_form",
        ".ops",
        ".select",
        ".toolchain",
    )
)

MAX_LINES = 400


@lru_cache
def pyproject() -> Any:
    """The parsed pyproject.toml."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@lru_cache
def package_folders() -> dict[str, Path]:
    """The top folders of the package: dotted name to folder, as pyproject maps them."""
    mapping = pyproject()["tool"]["setuptools"]["package-dir"]
    return {name: ROOT / folder for name, folder in mapping.items()}


@lru_cache
def modules() -> dict[str, Path]:
    """Every module of the package on disk: dotted name to file."""
    found = {}
    for package, folder in package_folders().items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            dotted = [package, *parts]
            found[".".join(dotted[:-1] if dotted[-1] == "__init__" else dotted)] = path
    return found


@dataclass(frozen=True)
class Import:
    """One import of one of our modules by another; `at_load` if it runs when the module does."""

    importer: str
    imported: str
    line: int
    at_load: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def is_type_checking(node: ast.AST) -> bool:
    """True for the block `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports_in(node: ast.AST, at_load: bool = True) -> Iterator[tuple[ast.stmt, bool]]:
    """The import statements under a node, each with whether it runs at load."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, at_load
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from imports_in(child, at_load and not inside and not is_type_checking(child))


def named_modules(statement: ast.stmt) -> Iterator[str]:
    """Our modules that an import statement names; `from package import module` names the module.

    A bare `import fx_fusion` names none: that module is empty until something is asked of it.
    """
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names if alias.name != "fx_fusion")
    elif isinstance(statement, ast.ImportFrom):
        assert statement.level == 0, "relative imports hide the direction"
        base = statement.module or ""
        for alias in statement.names:
            inner = f"{base}.{alias.name}"
            yield inner if inner in modules() else base


@lru_cache
def own_imports() -> tuple[Import, ...]:
    """Every import between our own modules, wherever it stands."""
    return tuple(
        Import(name, imported, statement.lineno, at_load)
        for name, path in modules().items()
        for statement, at_load in imports_in(ast.parse(path.read_text(encoding="utf-8")))
        for imported in named_modules(statement)
        if imported in modules()
    )


def layer(module: str) -> str:
    """The layer a module belongs to."""
    for side in ("passes", "lowering"):
        if f"{module}.".startswith(f"fx_fusion.{side}."):
            return side
    return "leaf" if module in LEAVES else "public"


#: Which layers each layer may import from. `lowering` is further limited to DOORS from outside.
MAY_IMPORT = {
    "leaf": {"leaf"},
    "lowering": {"leaf", "lowering"},
    "passes": {"leaf", "lowering", "passes"},
    "public": {"leaf", "lowering", "passes", "public"},
}


def test_imports_only_point_downwards() -> None:
    wrong = [
        str(i)
        for i in own_imports()
        # The package's own __init__ names everything, lazily; that is its purpose.
        if i.importer != "fx_fusion" and layer(i.imported) not in MAY_IMPORT[layer(i.importer)]
    ]
    assert wrong == []


def test_the_graph_side_enters_lowering_through_its_doors_alone() -> None:
    wrong = [
        str(i)
        for i in own_imports()
        if layer(i.imported) == "lowering" and layer(i.importer) != "lowering"
        if i.imported not in DOORS
        if i.importer != "fx_fusion"
    ]
    assert wrong == []


def test_no_module_is_part_of_an_import_cycle() -> None:
    edges: dict[str, set[str]] = {name: set() for name in modules()}
    for i in own_imports():
        if i.at_load:
            edges[i.importer].add(i.imported)
    # Take away, again and again, the modules that import nothing that is left.
    while ready := [name for name, below in edges.items() if not below & edges.keys()]:
        for name in ready:
            del edges[name]
    assert edges == {}, "these import each other"


def test_layers_name_modules_that_exist() -> None:
    assert {m for m in DOORS | TORCH_FREE | LEAVES if m not in modules()} == set()


@pytest.mark.parametrize("module", sorted(TORCH_FREE))
def test_module_imports_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_every_package_on_disk_is_installed() -> None:
    on_disk = {name for name, path in modules().items() if path.name == "__init__.py"}
    assert on_disk == set(pyproject()["tool"]["setuptools"]["packages"])


def test_every_data_file_of_a_package_is_installed() -> None:
    patterns = pyproject()["tool"]["setuptools"]["package-data"]
    left_out = [
        str(path.relative_to(ROOT))
        for package, folder in package_folders().items()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
        if not any(
            fnmatch.fnmatch(path.relative_to(folder).as_posix(), pattern)
            for pattern in patterns.get(package, [])
        )
    ]
    assert left_out == []


@lru_cache
def tracked_files() -> tuple[Path, ...]:
    """The files that git tracks, or all text in an unpacked archive."""
    if shutil.which("git") and (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        paths = [p for top in package_folders().values() for p in top.rglob("*.py")]
    return tuple(p for p in paths if p.is_file())


def test_no_python_file_is_too_long() -> None:
    lines = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in tracked_files()
        if path.suffix == ".py"
    }
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_no_tracked_file_holds_a_path_of_somebody_s_machine() -> None:
    # Assembled, so that this file does not match itself.
    personal = re.compile(
        rb"(?<![\w.$~}])/(?:" + b"|".join([b"root", b"home", b"Users", b"work"]) + rb")/"
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked_files()
        for number, line in enumerate(path.read_bytes().splitlines(), start=1)
        if personal.search(line)
    ]
    assert found == []


def branches_on_torch_version(tree: ast.AST) -> bool:
    """Whether torch's version is compared or parsed; to print it or hash it is no branch."""

    def decides(node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            return (
                re.search("version|parse", ast.unparse(node.func).lower().split(".")[-1])
                is not None
            )
        return isinstance(node, ast.Compare)

    return any(
        ast.unparse(inner) == "torch.__version__"
        for node in ast.walk(tree)
        if decides(node)
        for inner in ast.walk(node)
    )


def test_branches_on_torch_s_version_stand_in_compat_alone() -> None:
    found = {
        name
        for name, path in modules().items()
        if branches_on_torch_version(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found <= {"fx_fusion.compat"}


def test_every_reason_has_one_remedy_in_a_full_sentence() -> None:
    assert set(REMEDIES) == set(Reason)
    unfinished = [
        r.value for r, text in REMEDIES.items() if not re.fullmatch(r"\S.*\S\.", text)
    ]
    assert unfinished == []


def test_test_helpers_are_imported_by_bare_names_that_are_unique() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    names = [path.name for path in files if path.name not in ("__init__.py", "conftest.py")]
    assert sorted(set(names)) == sorted(names)
    dotted = re.compile(r"^\s*(?:from|import) tests\b", re.MULTILINE)
    assert [p.name for p in files if dotted.search(p.read_text(encoding="utf-8"))] == []
