"""What the library imports. The order of its layers is a contract in pyproject.toml (``lint-imports``)."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import spingrad


def test_no_two_modules_import_each_other_even_by_a_detour():
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("spingrad", cache_dir=None)
    imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(imported).prepare()


def test_the_tests_of_the_library_import_nothing_of_the_lab():
    imports = re.compile(r"^\s*(from|import) spingrad_lab", re.MULTILINE)
    assert not [path.name for path in Path(__file__).parent.rglob("*.py") if imports.search(path.read_text())]


def test_nothing_that_draws_or_tabulates_is_loaded_before_it_is_used():
    script = """
import sys, spingrad, spingrad.cli, spingrad.export, spingrad.qpu
print(*{name.split(".")[0] for name in sys.modules})
"""
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert not {"matplotlib", "rich", "pandas", "pooch", "spingrad_lab"} & set(loaded.split())


def test_each_name_in_the_optimizer_is_found_by_opening_one_file():
    """A newcomer reads optim/qpsbgd.py: every name is imported from the module that defines it."""
    source = Path(spingrad.__file__).parent
    tree = ast.parse((source / "optim/qpsbgd.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spingrad."):
            path = source / node.module.removeprefix("spingrad.").replace(".", "/")
            if path.is_dir():  # a module of a package
                assert all((path / f"{name.name}.py").exists() for name in node.names)
                continue
            body = ast.parse(path.with_suffix(".py").read_text()).body
            defined = {own.name for own in body if isinstance(own, ast.ClassDef | ast.FunctionDef)}
            defined |= {t.id for own in body if isinstance(own, ast.Assign) for t in own.targets}
            assert {name.name for name in node.names} <= defined
