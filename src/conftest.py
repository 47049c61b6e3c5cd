"""Examples in docstrings that need an extra or another program are skipped where it is missing."""

import shutil
from importlib.util import find_spec

import pytest

collect_ignore = ["conftest.py"]  # has no examples, and the name of another
MODULES = {  # by the name of an example, or of the package around it
    "spingrad.export.onnx": "onnx",
    "spingrad.export.qonnx": "onnx",
    "spingrad.export.verify.from_onnx": "onnxruntime",
    "spingrad.export.verify.from_qonnx": "qonnx",
    "spingrad.nn.gcn.normalized_adjacency": "torch_geometric",
    "spingrad.qpu": "dwave.system",
    "spingrad.solvers.gurobi": "gurobipy",
    "spingrad.testing.sapi": "dwave.system",
}
PROGRAMS = {
    "spingrad.export.chips.Run": "simavr",
    "spingrad.export.chips.run": "simavr",
    "spingrad.export.verify.compiled": "gcc",
    "spingrad.export.verify.from_c": "gcc",
}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Skip what cannot run here, and allow the warnings of other libraries."""
    for name, module in MODULES.items():
        if _is_in(item, name) and find_spec(module) is None:
            item.add_marker(pytest.mark.skip(reason=f"needs {module}"))
    for name, program in PROGRAMS.items():
        if _is_in(item, name) and shutil.which(program) is None:
            item.add_marker(pytest.mark.skip(reason=f"needs {program}"))
    if _is_in(item, "spingrad.distributed.ray.RaySolver"):
        item.add_marker(pytest.mark.skip(reason="needs a Ray cluster; test_ray.py runs it on one"))
    if _is_in(item, "spingrad.nn.gcn"):  # torch_geometric still scripts its classes
        item.add_marker(pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"))


def _is_in(item: pytest.Item, name: str) -> bool:
    return f"{item.name}.".startswith(f"{name}.")
