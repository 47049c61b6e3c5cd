"""What the library imports. The order of its layers is a contract in pyproject.toml (``lint-imports``)."""

import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest


def test_no_two_modules_import_each_other_even_by_a_detour():
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("spingrad", cache_dir=None)
    graph.remove_import(
        importer="spingrad.export.runtime", imported="spingrad.export.packed"
    )  # until the core is rewritten
    TopologicalSorter(
        {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    ).prepare()


def test_the_tests_of_the_library_never_name_the_lab():
    here = Path(__file__)
    naming = [
        path.name for path in here.parent.rglob("*.py") if path != here and "spingrad_lab" in path.read_text()
    ]
    assert set(naming) <= {
        "test_distributed.py",
        "test_qpu_faults.py",
    }  # until the core is rewritten: naming == []


@pytest.mark.parametrize("module", ["spingrad", "spingrad.cli", "spingrad.export", "spingrad.qpu"])
def test_nothing_that_draws_or_tabulates_is_loaded_before_it_is_used(module):
    if module == "spingrad.qpu":
        pytest.importorskip("dwave.cloud")
    script = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert not {"matplotlib", "rich", "pandas", "spingrad_lab"} & set(loaded.split())
