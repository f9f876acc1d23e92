"""Imports point one way, and worker processes import nothing that costs seconds."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# (who, may not import, but for these modules). A module counts with all that is below it.
RULES = [
    ("runtime", ["harness"], []),
    ("runtime", ["pandas", "scipy", "click", "pyarrow", "matplotlib", "rich", "pydantic"], []),
    ("runtime", ["torch", "tensorflow", "mpi4py"], []),
    ("runtime", ["pyverbs", "ibverbs"], ["runtime.transport.verbs"]),
    ("runtime", ["grpc", "google.protobuf"], ["runtime.transport.grpc", "runtime.cluster", "runtime.graph.serialize"]),
    ("runtime.graph", ["runtime.transport", "runtime.training"], []),
    ("runtime.graph", ["runtime.cluster"], ["runtime.graph.serialize"]),  # which needs the generated graph_pb2
    ("runtime.kernels", ["runtime.transport", "runtime.cluster", "runtime.execution", "runtime.training"], []),
    ("runtime.memory", ["runtime.transport", "runtime.cluster", "runtime.execution", "runtime.training"], []),
    ("runtime.transport", ["runtime.graph", "runtime.cluster", "runtime.execution", "runtime.training"], []),
    ("runtime.execution", ["runtime.cluster", "runtime.training"], []),
    ("runtime.models", ["runtime.transport", "runtime.cluster", "runtime.execution"], []),
    ("runtime.cluster", ["runtime.training", "runtime.models"], []),
    ("harness.analysis", ["runtime", "harness.bench", "harness.launch"], []),
    ("harness.plots", ["runtime", "harness.bench", "harness.launch"], []),
]


def modules() -> Iterator[tuple[str, Path]]:
    for package in ("runtime", "harness"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if "tests" not in parts:
                yield ".".join(parts).removesuffix(".__init__"), path


def imported(path: Path, module: str) -> Iterator[tuple[str, int]]:
    """(name, line) of everything that a file imports, wherever in it, but for type checking."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno


def below(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


@pytest.mark.parametrize(("who", "forbidden", "exempt"), RULES, ids=lambda value: str(value))
def test_imports_point_one_way(who: str, forbidden: list[str], exempt: list[str]) -> None:
    offences = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for module, path in modules()
        if below(module, who) and not any(below(module, allowed) for allowed in exempt)
        for name, line in imported(path, module)
        if any(below(name, root) for root in forbidden)
    ]
    assert not offences, "\n".join(offences)


@pytest.mark.parametrize("module", ["runtime.cluster.__main__", "runtime.cluster.server", "runtime.cluster.session"])
def test_a_worker_process_stays_light(module: str) -> None:
    heavy = ["pandas", "scipy", "click", "pyarrow", "matplotlib", "sklearn", "pydantic", "torch"]
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == "[]"


def test_the_command_line_is_read_before_numpy_loads() -> None:
    code = "import sys, runtime.cluster.__main__, runtime.cluster.options; print('numpy' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == "False"


def test_no_catch_all_modules() -> None:
    names = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [str(path) for module, path in modules() if module.rpartition(".")[2] in names] == []
